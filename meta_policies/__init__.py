"""Meta-policies: what chooses recipes. Heuristics and trained models share SB3's `predict`."""
