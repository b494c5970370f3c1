"""Makes the policy net `net:letters`: logs the default rules on meta-train letters rounds and clones their decisions.

Writes `meta_policies/controllers/nets/letters.safetensors`. The rounds are those of `make_in_loop_effects`, whose
instances are meta-test, and some with right learning rates.

    python -m posttrain_gym.experiments.make_in_loop_net
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .make_in_loop_effects import SCENARIOS, Scenario, inner_task, scenario_recipe

NET = Path(__file__).resolve().parent.parent / "meta_policies" / "controllers" / "nets" / "letters.safetensors"
INSTANCES = (3, 8, 13, 16, 17)
"""Meta-train instances, one of each base."""
RIGHT = {"sft": 1e-3, "grpo": 3e-4}
ROUNDS = 72
SEED = 0
CLONING: dict[str, Any] = {"updates": 3000, "learning_rate": 3e-3, "sparsity": 1e-4, "balance": 0.6}
"""Settings of the cloning, chosen by the recall on held-out rounds of these logs."""


def logged_rounds(rounds: int = ROUNDS) -> Iterator[tuple[Scenario, float, int, int]]:
    """Return scenario, learning rate, instance and seed of each round that is logged.

    The scenarios take turns; in every third turn the rate is right, else it is the scenario's, each within 30 %.
    """
    rng = np.random.default_rng(SEED)
    for number in range(rounds):
        turn, scenario = number // len(SCENARIOS), SCENARIOS[number % len(SCENARIOS)]
        rate = RIGHT[scenario.settings["algorithm"]] if turn % 3 == 2 else scenario.settings["learning_rate"]
        instance = INSTANCES[(number + turn) % len(INSTANCES)]
        yield scenario, float(rate * np.exp(rng.uniform(-0.3, 0.3))), instance, 1000 + number


def log_rules(folder: Path, rounds: int = ROUNDS) -> None:
    """Run the rounds under the default rules and log their decisions."""
    from ..inner_trainers.trl.trainer import TrlTrainer
    from ..meta_policies.controllers.catalogue import make_controller
    from ..meta_policies.controllers.decision_log import DecisionLog
    from ..meta_policies.controllers.drive import drive_round

    trainer = TrlTrainer()
    with DecisionLog(folder) as log:
        for number, (scenario, rate, instance, seed) in enumerate(logged_rounds(rounds), start=1):
            task = inner_task(scenario, instance)
            recipe = replace(scenario_recipe(scenario, task, trainer), learning_rate=rate)
            session = trainer.begin(task, recipe, trainer.base(task), seed)
            try:
                driven = drive_round(session, recipe, make_controller("rules"), log=log)
                report, _ = session.result()
            finally:
                session.close()
            log.end(report)
            done = f"rate {rate:.2g}, instance {instance}: {driven.applied} adjustments"
            print(f"{number}/{rounds} {scenario.name}, {done}", flush=True)


def main() -> None:
    """Log the rules, clone them and write the net."""
    from ..meta_policies.controllers.cloning import CloningSettings
    from ..meta_policies.controllers.net_training import train_net

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=None, help="folder of logs that are there already")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds to log")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.logs
        if folder is None:
            folder = Path(temporary)
            log_rules(folder, arguments.rounds)
        NET.parent.mkdir(exist_ok=True)
        made = train_net([folder], NET, seed=SEED, cloning=CloningSettings(**CLONING))
    print(made.cloning.to_dict())
    print(f"{made.path}: {made.net.parameters} parameters, {made.rounds} rounds, may choose {made.net.actions}")


if __name__ == "__main__":
    main()
