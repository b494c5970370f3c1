"""The tables of the documentation are those that the code makes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from posttrain_gym import wrappers
from posttrain_gym.envs.constraints import FACTS
from posttrain_gym.envs.space_file import load_space_file, parse_space_file
from posttrain_gym.envs.space_knobs import EXPLORATION, LOG_KNOBS
from posttrain_gym.envs.space_schema import known_keys
from posttrain_gym.experiments.doc_tables import (
    adjustments_table,
    algorithm_table,
    fault_table,
    in_loop_observation_table,
    signal_table,
)
from posttrain_gym.inner_trainers.adjustments import KINDS
from posttrain_gym.inner_trainers.base import CAUSES
from posttrain_gym.inner_trainers.base_models import BUILT_IN_MODELS
from posttrain_gym.inner_trainers.benchmarks.verifiers import VERIFIERS, verifier_class
from posttrain_gym.inner_trainers.benchmarks.verifiers.extraction import PLAIN_WAYS, Extraction
from posttrain_gym.inner_trainers.benchmarks.verifiers.instructions import KINDS as KINDS_OF_INSTRUCTIONS
from posttrain_gym.inner_trainers.benchmarks.verifiers.refusal import LOOKED_AT
from posttrain_gym.inner_trainers.data.overlap import LONGEST_RUN, SHORTEST_RUN
from posttrain_gym.inner_trainers.fault_kinds import FAULTS
from posttrain_gym.inner_trainers.signals import SIGNALS
from posttrain_gym.inner_trainers.tiny_models import TINY_ARCHITECTURES
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.meta_policies.controllers.rule_file import parse_rules
from posttrain_gym.meta_policies.hyperparameters import load_hyperparameters
from posttrain_gym.meta_policies.sb3 import SB3_ALGORITHMS

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_table_of_algorithms_is_the_registry() -> None:
    table = algorithm_table()
    assert table in (DOCS / "algorithms.md").read_text()
    assert table.count("\n") == 1 + len(ALGORITHMS)


def test_the_table_of_faults_is_the_one_the_code_uses() -> None:
    table = fault_table()
    assert table in (DOCS / "faults.md").read_text()
    assert table.count("\n") == 1 + len(FAULTS)
    assert {fault.cause for fault in FAULTS.values()} == set(CAUSES)


def test_the_tables_of_signals_and_adjustments_are_those_the_code_uses() -> None:
    page = (DOCS / "in_loop.md").read_text()
    assert signal_table() in page
    assert signal_table().count("\n") == 1 + len(SIGNALS)
    assert adjustments_table() in page
    assert adjustments_table().count("\n") == 1 + len(KINDS)


def test_the_table_of_in_loop_observations_is_the_one_the_code_uses() -> None:
    assert in_loop_observation_table() in (DOCS / "environment.md").read_text()


def test_the_decision_spaces_of_the_documentation_are_read() -> None:
    page = (DOCS / "decision_space.md").read_text()
    files = [parse_space_file(text, "decision_space.md") for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    spaces = [file.decision_space() for file in files]
    assert [len(space.constraints) for space in spaces] == [1, 0, 8]
    assert spaces[1].conditions["kl_coef"] == ("(algorithm == grpo and lora_rank > 0) and algorithm in [grpo, rloo]")
    assert (
        len(load_space_file(DOCS.parent / "experiments" / "examples" / "space.yaml").decision_space().parameters) == 7
    )


def test_the_page_of_decision_spaces_names_every_key_scale_and_fact() -> None:
    page = (DOCS / "decision_space.md").read_text()
    for section in ("budget", "evaluator", "reward"):
        for key in known_keys((section,)):
            assert f"`{section}.{key}`" in page or f"`{key}` is the same" in page, key
    for key in known_keys(("decision_space",)):
        assert f"`decision_space.{key}`" in page or f"`{key}` is the same" in page, key
    for name in (*LOG_KNOBS, *EXPLORATION, *FACTS):
        assert f"`{name}`" in page, name


def test_the_rule_file_of_the_documentation_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "controllers.md").read_text(), re.S)
    assert [rule.name for rule in parse_rules(text, "controllers.md").rules] == ["KL runaway", "slower at the end"]


def test_the_page_of_meta_policies_names_every_algorithm_and_its_file_is_read(tmp_path: Path) -> None:
    page = (DOCS / "meta_policies.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (\w+) \|", page, re.M)
    assert rows == [(name, algorithm.acts) for name, algorithm in SB3_ALGORITHMS.items()]
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    path = tmp_path / "ppo.yml"
    path.write_text(text)
    found = load_hyperparameters(path, "ppo")
    assert (found.n_timesteps, found.arguments["learning_rate"]) == (500, "lin_3e-4")


def test_the_page_of_benchmarks_names_every_verifier_and_setting_as_they_are() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    assert set(rows) == set(VERIFIERS)
    for name, row in rows.items():
        settings = {field.name for field in fields(verifier_class(name))}
        columns, scores = row.split(" | ")
        assert set(re.findall(r"`(\w+)`", scores)) <= settings
        assert columns
    (paragraph,) = re.findall(r"^\*\*Extraction\.\*\*.*?\n\n", page, re.M | re.S)
    ways = re.findall(r"`(?:extract: )?([a-z_]+(?::\w+)?:?)`", paragraph.split("completion:")[1])
    assert {way.split(":")[0] for way in ways} == {*PLAIN_WAYS, "after", "tag", "regex"}
    for way in ways:
        Extraction(way)
    assert f"first {LOOKED_AT} characters" in page
    assert f"The {len(KINDS_OF_INSTRUCTIONS)} kinds" in page
    assert f"{LONGEST_RUN} words in a row with an item, or all words of an item of {SHORTEST_RUN} to" in page


def test_the_page_of_wrappers_names_every_wrapper() -> None:
    page = (DOCS / "wrappers.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.M)) == set(wrappers.__all__)


def test_the_page_on_models_has_every_built_in_one_and_every_architecture_that_is_tested() -> None:
    page = (DOCS / "models.md").read_text()
    for model in BUILT_IN_MODELS.values():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{model.name}`" in line)
        assert f"{model.parameters:,}" in row and model.licence in row
    for architecture in TINY_ARCHITECTURES:
        name = re.sub(r"[^a-z0-9]", "", architecture.removesuffix("_text"))
        assert name in re.sub(r"[^a-z0-9]", "", page.lower()), architecture
