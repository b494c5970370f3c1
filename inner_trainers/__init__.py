"""Inner training: recipes, tasks, trainers, sessions and evaluation. Usable without Gymnasium."""
