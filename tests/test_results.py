"""Committed results: a sample is made again, and every derived page equals what its data gives."""

from __future__ import annotations

import json
import math

import pytest

from posttrain_gym.experiments import make_effects as effects
from posttrain_gym.experiments import make_in_loop_effects as in_loop
from posttrain_gym.experiments import make_in_loop_net as in_loop_net
from posttrain_gym.experiments import make_letters_controls as controls
from posttrain_gym.experiments import make_letters_rounds as rounds
from posttrain_gym.experiments import make_probes as probes
from posttrain_gym.experiments.comparison import normalised
from posttrain_gym.experiments.statistics import mean_of_task_means, task_bootstrap_interval
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.letters import BASES, TEST_SEEDS, TRAIN_SEEDS
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS


def test_the_table_is_complete_and_shows_that_the_best_recipe_depends_on_the_state() -> None:
    rows = rounds.read_results()
    args = rounds.Args()
    keys = {(row["instance"], row["recipe_name"], row["seed"]) for row in rows}
    assert keys == {(i, name, s) for i in args.instances for name in rounds.RECIPES for s in args.seeds}
    assert len(rows) == 21 * 10 * 3
    bases = {row["instance"]: row["base"] for row in rows}.values()
    assert min(map(list(bases).count, BASES)) >= 3
    for claim, where in rounds.claims(rows).items():
        assert len(where) >= 2, claim


def test_the_page_and_the_shortlist_come_from_the_data() -> None:
    rows = rounds.read_results()
    assert (rounds.RESULTS / "letters_rounds.md").read_text() == rounds.describe(rows)
    assert json.loads(rounds.SHORTLIST.read_text()) == json.loads(json.dumps(rounds.shortlist(rows)))


def test_cells_by_hand() -> None:
    def row(seed: int, after: float) -> dict[str, object]:
        return {
            "instance": 1,
            "recipe_name": "r",
            "seed": seed,
            "base_test_score": 0.5,
            "base_test_error": 0.03,
            "test_score": after,
            "test_error": 0.04,
        }

    ((change, error),) = rounds.cells([row(0, 0.6), row(1, 0.7), row(2, 0.8)]).values()
    assert change == pytest.approx(0.2)
    assert error == pytest.approx(math.sqrt((0.1 / math.sqrt(3)) ** 2 + 0.03**2 + 0.04**2))
    ((name, gain),) = rounds.ranked_recipes([row(0, 0.6), row(1, 0.8)])
    assert name == "r"
    assert gain == pytest.approx(normalised(0.5, 0.7))


def test_portfolio_by_hand() -> None:
    """Two instances: ``a`` is best alone, ``c`` adds most to it although its own mean is the worst."""

    def row(instance: int, name: str, gain: float) -> dict[str, object]:
        return {"instance": instance, "recipe_name": name, "seed": 0, "base_test_score": 0.0, "test_score": gain}

    rows = [row(1, "a", 0.5), row(2, "a", 0.1), row(1, "b", 0.4), row(2, "b", 0.1), row(1, "c", -0.9), row(2, "c", 0.3)]
    names, values = zip(*rounds.portfolio(rows), strict=True)
    assert names == ("a", "c")
    assert values == pytest.approx((0.3, 0.4))


@pytest.mark.parametrize(("instance", "name"), [(2, "sft-curated"), (0, "grpo"), (5, "sft-hot")])
def test_a_sample_of_rounds_gives_the_committed_scores(instance: int, name: str) -> None:
    committed = next(
        row
        for row in rounds.read_results()
        if (row["instance"], row["recipe_name"], row["seed"]) == (instance, name, 0)
    )
    again = rounds.run_instance(instance, (0,), (name,))[0]
    assert again["content_hash"] == committed["content_hash"]
    assert Recipe.from_dict(json.loads(again["recipe"])) == Recipe.from_dict(json.loads(committed["recipe"]))
    assert again["train_tokens"] == pytest.approx(committed["train_tokens"], rel=0.02)
    # equal bit for bit on one machine; another processor may round differently, and a score has its error
    assert again["base_test_score"] == pytest.approx(committed["base_test_score"], abs=2 * committed["base_test_error"])
    assert again["test_score"] == pytest.approx(committed["test_score"], abs=2 * committed["test_error"] + 1e-9)


def test_the_controls_show_what_the_docs_say() -> None:
    """Each claim of docs/letters.md by more than two standard errors of its difference."""
    rows = controls.read_results()
    assert (rounds.RESULTS / "letters_controls.md").read_text() == controls.describe(rows)
    found = controls.changes(rows)

    def above(left: str, right: str) -> bool:
        return found[left][0] - found[right][0] > 2 * math.hypot(found[left][1], found[right][1])

    def below_zero(name: str) -> bool:
        return found[name][0] < -2 * found[name][1]

    first = {row["control"]: row for row in rows}
    assert first["gap, clean data"]["reasoning_pass_at_k"] < 0.1 < first["messy, clean data"]["reasoning_pass_at_k"]
    assert above("gap, clean data", "gap, sound verifier")
    assert above("messy, sound verifier", "messy, noisy data")
    assert above("messy, clean data", "messy, sound verifier")
    assert abs(found["messy, noisy data"][0]) < 2 * found["messy, noisy data"][1]
    assert below_zero("messy, verifier that pays for length")
    assert below_zero("strong, noisy data")
    assert found["strong, clean data"][0] > 2 * found["strong, clean data"][1]
    table = rounds.cells(rounds.read_results())
    hot = [value for (_, name), value in table.items() if name == "grpo-hot"]
    assert len(hot) == 21
    assert all(change < -2 * error for change, error in hot)


def test_a_control_gives_its_committed_scores() -> None:
    committed = next(row for row in controls.read_results() if row["control"] == "messy, sound verifier")
    again = controls.run_control("messy, sound verifier", (committed["seed"],))[0]
    assert again["content_hash"] == committed["content_hash"]
    assert again["test_score"] == pytest.approx(committed["test_score"], abs=2 * committed["test_error"])


def test_every_algorithm_helps_and_can_hurt_by_more_than_two_standard_errors() -> None:
    rows = effects.read_results()
    assert (rounds.RESULTS / "effects.md").read_text() == effects.describe(rows)
    assert {(row["case"], row["seed"]) for row in rows} == {(c.name, s) for c in effects.CASES for s in effects.SEEDS}
    assert len(rows) == len(effects.CASES) * len(effects.SEEDS)
    found = effects.changes(rows)
    for algorithm in ALGORITHMS:
        assert {case.effect for case in effects.CASES if case.algorithm == algorithm} == {"helps", "hurts"}
    for case in effects.CASES:
        change, error = found[case.name]
        signed = change if case.effect == "helps" else -change
        assert signed > 2 * error, case.name
        each = [row["test_score"] - row["base_test_score"] for row in rows if row["case"] == case.name]
        assert all((value > 0) == (case.effect == "helps") for value in each), case.name


@pytest.mark.parametrize(
    "what", ["value head", "sigmoid+sft loss", "verifier that pays for length", "conversations that use the tool"]
)
def test_a_sample_of_effects_gives_the_committed_scores(what: str) -> None:
    case = next(case for case in effects.CASES if case.what == what)
    committed = next(row for row in effects.read_results() if row["case"] == case.name and row["seed"] == 0)
    again = effects.run_case(case, (0,))[0]
    for name in ("content_hash", "recipe", "failure", "steps"):
        assert again[name] == committed[name]
    assert again["train_tokens"] == pytest.approx(committed["train_tokens"], rel=0.02)
    # equal bit for bit on one machine; another processor may round differently, and a score has its error
    assert again["base_test_score"] == pytest.approx(committed["base_test_score"], abs=2 * committed["base_test_error"])
    assert again["test_score"] == pytest.approx(committed["test_score"], abs=2 * committed["test_error"] + 1e-9)


def test_what_a_probe_suggests_helps_and_what_it_warns_of_does_not() -> None:
    rows = probes.read_results()
    assert (rounds.RESULTS / "probes.md").read_text() == probes.describe(rows)
    assert {row["algorithm"] for row in rows} == set(ALGORITHMS)
    for algorithm in ALGORITHMS:
        group = {row["learning_rate"]: row for row in rows if row["algorithm"] == algorithm}
        first = next(iter(group.values()))
        suggested, hurts = group[first["suggested_rate"]], group[first["hurts_from"]]
        assert first["range_low"] <= suggested["learning_rate"] <= first["range_high"] < hurts["learning_rate"]
        assert suggested["score"] - suggested["base_score"] > 2 * suggested["score_error"], algorithm
        assert suggested["score"] - hurts["score"] > 2 * math.hypot(suggested["score_error"], hurts["score_error"])


def test_a_probe_gives_its_committed_suggestion() -> None:
    committed = [row for row in probes.read_results() if row["algorithm"] == "sft"]
    again = probes.probe_algorithm("sft")
    for name in ("content_hash", "suggested_rate", "hurts_from", "verdict"):
        assert [row[name] for row in again] == [row[name] for row in committed]
    for new, old in zip(again, committed, strict=True):
        assert new["gain"] == pytest.approx(old["gain"], abs=2 * old["gain_error"] + 1e-3)
        assert new["score"] == pytest.approx(old["score"], abs=2 * old["score_error"])


def test_in_loop_differences_by_hand() -> None:
    """Two instances with two rounds each: paired differences, joined by instance."""
    base = {"scenario": "s", "base_test_score": 0.2}
    scores = {"a": (0.5, 0.7, 0.3, 0.3), "b": (0.4, 0.7, 0.3, 0.2)}
    units = ((1, 0), (1, 1), (2, 1), (2, 2))
    rows = [
        {**base, "arm": arm, "instance": instance, "seed": seed, "test_score": score}
        for arm, values in scores.items()
        for (instance, seed), score in zip(units, values, strict=True)
    ]
    assert in_loop.gains(rows, "s", "b") == pytest.approx({(1, 0): 0.2, (1, 1): 0.5, (2, 1): 0.1, (2, 2): 0.0})
    mean, low, high = in_loop.difference(rows, "s", "a", "b")
    assert mean == pytest.approx(0.05)
    assert (low, high) == pytest.approx((0.0, 0.1))
    uneven = {(1, 0): 0.1, (1, 1): 0.4, (2, 1): -0.2, (2, 2): 0.9, (3, 0): 0.3, (3, 1): 0.2}
    tasks = [[0.1, 0.4], [-0.2, 0.9], [0.3, 0.2]]
    expected = task_bootstrap_interval(tasks, mean_of_task_means, resamples=4000)
    assert in_loop.estimate(uneven) == pytest.approx((mean_of_task_means(tasks), *expected), abs=0.02)
    assert in_loop.word(low, high) == "not told apart"
    assert in_loop.word(0.01, 0.1) == "better"
    assert in_loop.word(-0.1, -0.01) == "worse"


def test_in_loop_effects_are_complete_fair_and_untuned() -> None:
    rows = in_loop.read_results()
    assert (rounds.RESULTS / "in_loop_effects.md").read_text() == in_loop.describe(rows)
    keys = [in_loop.key_of(row) for row in rows]
    assert keys == [(s.name, arm, *unit) for s in in_loop.SCENARIOS for arm in s.arms for unit in in_loop.UNITS]
    assert {instance for instance, _ in in_loop.UNITS} <= set(TEST_SEEDS)
    assert set(in_loop_net.INSTANCES) <= set(TRAIN_SEEDS)
    assert len({seed for _, seed in in_loop.UNITS}) == 5
    for row in rows:
        assert row["train_tokens"] <= row["limit"], in_loop.key_of(row)
        assert row["controller"] == in_loop.controller_digest(row["arm"]), "rules or net changed since; run it again"
    for scenario in in_loop.SCENARIOS:
        for unit in in_loop.UNITS:
            same = [r for r in rows if r["scenario"] == scenario.name and (r["instance"], r["seed"]) == unit]
            assert len({(r["limit"], r["content_hash"], r["recipe"], r["base_test_score"]) for r in same}) == 1


@pytest.mark.parametrize(("scenario", "arm"), [(0, "rules"), (1, "schedule:cosine"), (1, "net:letters")])
def test_a_sample_of_in_loop_effects_gives_the_committed_scores(scenario: int, arm: str) -> None:
    chosen, (instance, seed) = in_loop.SCENARIOS[scenario], in_loop.UNITS[0]
    key = (chosen.name, arm, instance, seed)
    committed = next(row for row in in_loop.read_results() if in_loop.key_of(row) == key)
    again = in_loop.run_cell(chosen, arm, instance, seed, committed["limit"])
    for name in ("content_hash", "recipe", "failure", "steps"):
        assert again[name] == committed[name]
    assert again["rates"][0] == pytest.approx(committed["rates"][0])
    assert again["train_tokens"] == pytest.approx(committed["train_tokens"], rel=0.02)
    # equal bit for bit on one machine; another processor may round differently, and a score has its error
    assert again["test_score"] == pytest.approx(committed["test_score"], abs=2 * committed["test_error"] + 1e-9)
