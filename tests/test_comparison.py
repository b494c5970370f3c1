"""A comparison's figures are those worked by hand, survive JSON and Parquet, and are what plots and report show."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from posttrain_gym.experiments.comparison import Comparison, EpisodeResult, RoundRecord, summarise
from posttrain_gym.experiments.comparison_files import from_json, read_parquet, to_json, write_parquet
from posttrain_gym.experiments.plots import plot_best_so_far, plot_intervals, plot_training
from posttrain_gym.experiments.report import verdicts, write_report


def episode(policy: str, instance: int, seed: int, final: float, **changes: Any) -> EpisodeResult:
    """Returns an episode from a base score of 0.5, so that a final score of 0.5 + g / 2 is a gain of g."""
    values: dict[str, Any] = {
        "base_score": 0.5,
        "base_error": 0.01,
        "final_error": 0.01,
        "base_validation_score": 0.4,
        "validation_gain": 0.2,
        "budget_used": 1.0,
        "rounds": 2,
        "failures": {"data": 1},
        "trajectory": (
            RoundRecord(1, 0.25, 0.4, 0.5, "sft lr=1e-3", 0.0, "failed", "data"),
            RoundRecord(2, 1.0, 0.52, final, f"grpo by {policy} on {instance}", 0.12),
        ),
    }
    return EpisodeResult(policy, instance, seed, final_score=final, **(values | changes))


# (instance, seed) -> final score; the gains are twice the distance from 0.5.
RANDOM = {(0, 0): 0.60, (0, 1): 0.70, (1, 0): 0.55, (1, 1): 0.50}
TRAINED = {(0, 0): 0.80, (0, 1): 0.65, (1, 0): 0.60, (1, 1): 0.51}


def two_by_two(**changes: Any) -> list[EpisodeResult]:
    """Returns two policies on two instances with two seeds."""
    return [
        episode(policy, instance, seed, final, **changes)
        for policy, finals in (("random", RANDOM), ("trained", TRAINED))
        for (instance, seed), final in finals.items()
    ]


def many(policies: dict[str, float], n_instances: int = 2, n_seeds: int = 6) -> list[EpisodeResult]:
    """Returns episodes whose gains scatter by about 0.05 around each policy's mean."""
    generator = np.random.default_rng(0)
    return [
        episode(policy, instance, seed, float(np.clip(0.5 + (mean + generator.normal(0.0, 0.05)) / 2, 0.0, 1.0)))
        for policy, mean in policies.items()
        for instance in range(n_instances)
        for seed in range(n_seeds)
    ]


def test_figures_by_hand() -> None:
    comparison = summarise(two_by_two())
    random, trained = comparison.policy("random"), comparison.policy("trained")
    assert comparison.reference == "random"
    assert (comparison.instances, comparison.seeds_per_instance, comparison.resampling) == ((0, 1), 2, "seeds")
    assert random.gain.value == pytest.approx((0.2 + 0.4 + 0.1 + 0.0) / 4)
    assert trained.gain.value == pytest.approx((0.6 + 0.3 + 0.2 + 0.02) / 4)
    assert trained.interquartile_gain.value == pytest.approx((0.2 + 0.3) / 2)
    # best per (instance, seed): 0.6, 0.4, 0.2, 0.02
    assert random.regret.value == pytest.approx((0.4 + 0.0 + 0.1 + 0.02) / 4)
    assert trained.regret.value == pytest.approx((0.0 + 0.1 + 0.0 + 0.0) / 4)
    assert trained.gain_over_reference is not None and trained.probability_over_reference is not None
    assert trained.gain_over_reference.value == pytest.approx((0.4 - 0.1 + 0.1 + 0.02) / 4)
    # instance 0: 0.6 beats both, 0.3 beats 0.2 -> 3 of 4; instance 1: 0.2 beats both, 0.02 beats 0 -> 3 of 4
    assert trained.probability_over_reference.value == 0.75
    assert random.gain_over_reference is None and random.probability_over_reference is None
    assert random.failures == {"data": 4} and random.mean_rounds == 2.0 and random.mean_budget_used == 1.0
    # 2 * sqrt(0.01^2 + 0.01^2) = 0.028: only the change of 0 (random) and of 0.01 (trained) are within it
    assert random.within_noise_share == 0.25 and trained.within_noise_share == 0.25
    for summary in comparison.policies:
        assert summary.gain.low <= summary.gain.value <= summary.gain.high
        assert 0.0 <= summary.regret.low <= summary.regret.value <= summary.regret.high


def test_summary_does_not_depend_on_row_order_but_for_the_reference() -> None:
    rows = two_by_two()
    forward, backward = summarise(rows, reference="random"), summarise(rows[::-1], reference="random")
    assert forward.policy("trained") == backward.policy("trained")
    assert summarise(rows[::-1]).reference == "trained"


def test_failures_are_counted_by_cause() -> None:
    rows = [replace(row, failures={"data": 1, "resources": 2} if row.seed else {}) for row in two_by_two()]
    assert summarise(rows).policy("random").failures == {"data": 2, "resources": 4}


def test_no_change_with_no_error_is_noise_not_gain() -> None:
    assert episode("a", 0, 0, 0.5, base_error=0.0, final_error=0.0).within_noise


def test_a_base_score_of_one_does_not_divide_by_zero() -> None:
    assert episode("a", 0, 0, 0.9, base_score=1.0).normalised_gain == pytest.approx(-100.0)


def test_a_missing_episode_is_named() -> None:
    rows = [row for row in two_by_two() if (row.policy, row.instance, row.seed) != ("trained", 1, 0)]
    with pytest.raises(ValueError, match=re.escape("policy 'trained' lacks 1 of 4: (instance 1, seed 0)")):
        summarise(rows)


def test_an_instance_with_fewer_seeds_is_named() -> None:
    rows = [row for row in two_by_two() if (row.instance, row.seed) != (1, 1)]
    with pytest.raises(ValueError, match=re.escape("instance 0 has seeds [0, 1], instance 1 has seeds [0]")):
        summarise(rows)


def test_an_episode_given_twice_is_named() -> None:
    with pytest.raises(ValueError, match="'trained', instance 1, seed 1: given twice"):
        summarise([*two_by_two(), episode("trained", 1, 1, 0.6)])


@pytest.mark.parametrize("name", ["final_score", "base_error", "validation_gain", "budget_used"])
def test_nan_is_refused_with_the_episode_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"'trained', instance 3, seed 7: {name} must be a finite number"):
        episode("trained", 3, 7, **({"final": 0.6} | {name.replace("final_score", "final"): math.nan}))


def test_a_nan_in_the_trajectory_is_refused_with_its_round() -> None:
    with pytest.raises(ValueError, match="'a', instance 0, seed 0: trajectory, round 2: best_test_score"):
        episode("a", 0, 0, 0.6, trajectory=(RoundRecord(2, 0.5, 0.5, math.nan),))


def test_a_trajectory_that_gives_budget_back_is_refused() -> None:
    with pytest.raises(ValueError, match="round 2: budget_fraction"):
        episode("a", 0, 0, 0.6, trajectory=(RoundRecord(1, 0.5, 0.5), RoundRecord(2, 0.4, 0.5)))


def test_other_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        summarise([])
    with pytest.raises(ValueError, match=r"'best' is not among the compared policies \['random', 'trained'\]"):
        summarise(two_by_two(), reference="best")
    with pytest.raises(ValueError, match="at least two seeds"):
        summarise([episode("a", 0, 0, 0.6)], resampling="seeds")
    with pytest.raises(ValueError, match=r"\['random', 'trained'\]"):
        summarise(two_by_two()).policy("ppo")


def test_plain_rows_and_numpy_scalars_are_taken() -> None:
    row = json.loads(to_json(summarise(two_by_two())))["episodes"][0]
    assert EpisodeResult.from_mapping(row | {"normalised_gain": 0.2}) == two_by_two()[0]
    with pytest.raises(ValueError, match=r"normalised_gain is 0\.3"):
        EpisodeResult.from_mapping(row | {"normalised_gain": 0.3})
    with pytest.raises(ValueError, match=r"unknown keys \['scores'\]"):
        EpisodeResult.from_mapping(row | {"scores": 1})
    with pytest.raises(ValueError, match="missing 1 required positional argument: 'seed'"):
        EpisodeResult.from_mapping({key: value for key, value in row.items() if key != "seed"})
    scalars: Any = episode("a", 0, 0, 0.5, recorded=np.True_, rounds=np.int64(3), budget_used=np.float32(0.5))
    assert (scalars.recorded, scalars.rounds, scalars.budget_used) == (True, 3, 0.5)
    assert json.loads(to_json(summarise([scalars])))["episodes"][0]["recorded"] is True


def test_what_the_bootstrap_redraws_is_said() -> None:
    seeds = summarise(many({"a": 0.1}, 2, 12))
    assert seeds.interval_label == "95% bootstrap interval over seeds (12 per instance), instances held fixed"
    few = summarise(two_by_two())
    assert few.interval_label.endswith("too narrow, about 71% of the right width")
    instances = summarise(many({"a": 0.1}, 12, 1), confidence=0.9)
    assert instances.resampling == "instances"
    assert instances.interval_label == "90% bootstrap interval over instances (12, one seed each)"
    assert instances.policies[0].gain.low < instances.policies[0].gain.value < instances.policies[0].gain.high
    single = summarise([episode("a", 0, 0, 0.6)])
    assert single.interval_label == "no interval: one episode per policy"
    assert single.policies[0].gain.low == single.policies[0].gain.high == pytest.approx(0.2)
    both = summarise(many({"a": 0.1}, 12, 2), resampling="instances")
    assert both.interval_label == "95% bootstrap interval over instances (12) and their 2 seeds"


def test_json_round_trip_is_equal() -> None:
    comparison = summarise(two_by_two(recorded=True))
    text = to_json(comparison)
    assert from_json(text) == comparison
    assert "NaN" not in text
    with pytest.raises(ValueError, match="format 99"):
        from_json(text.replace('"format": 1', '"format": 99'))


def test_parquet_round_trip_is_equal(tmp_path: Path) -> None:
    rows = two_by_two()
    rows[0] = replace(rows[0], failures={}, trajectory=(), recorded=True)
    rows[1] = replace(rows[1], trajectory=(RoundRecord(1, 0.3, 0.4),))
    paths = write_parquet(rows, tmp_path)
    assert [path.name for path in paths] == ["episodes.parquet", "rounds.parquet"]
    assert read_parquet(tmp_path) == tuple(rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["episodes.parquet", "rounds.parquet"]


def png_size(path: Path) -> tuple[int, int]:
    """Returns a PNG's width and height from its header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def policy_lines(figure: Any) -> dict[str, Line2D]:
    """Returns the line of each policy."""
    lines = [line for line in figure.axes[0].get_lines() if str(line.get_gid()).startswith("policy:")]
    return {str(line.get_gid()).removeprefix("policy:"): line for line in lines}


def test_best_so_far_steps_where_rounds_end(tmp_path: Path) -> None:
    figure = plot_best_so_far(two_by_two(), tmp_path / "a.png")
    lines = policy_lines(figure)
    assert set(lines) == {"random", "trained"}
    budget, gain = (np.asarray(values, dtype=float) for values in lines["trained"].get_data())
    assert gain[budget < 1.0].tolist() == pytest.approx([0.0] * int((budget < 1.0).sum()))
    assert gain[-1] == pytest.approx((0.6 + 0.3 + 0.2 + 0.02) / 4)
    axes = figure.axes[0]
    assert "TEST" in axes.get_ylabel()
    assert axes.get_title(loc="left").startswith("Best so far") and "recorded" not in axes.get_title(loc="left")
    assert any("n = 4 episodes per policy" in text.get_text() for text in axes.texts)
    width, height = png_size(tmp_path / "a.png")
    assert width == 1260 and 600 < height < 1500


def test_best_so_far_band_holds_instances_fixed(tmp_path: Path) -> None:
    # The instances differ, their seeds do not: redrawing seeds alone moves nothing, so the band has no width.
    rows = [episode("a", instance, seed, 0.6 + 0.1 * instance) for instance in range(3) for seed in range(2)]
    figure = plot_best_so_far(rows, tmp_path / "a.png")
    (band,) = figure.axes[0].collections
    heights = np.asarray(band.get_paths()[0].vertices, dtype=float)[:, 1]
    assert set(np.round(heights, 9).tolist()) == {0.0, 0.4}  # 0.4 is the mean of 0.2, 0.4 and 0.6


def test_best_so_far_falls_back_to_validation_and_marks_recorded_rounds(tmp_path: Path) -> None:
    rows = two_by_two(trajectory=(RoundRecord(1, 0.5, 0.7),))
    rows[0] = replace(rows[0], recorded=True)
    figure = plot_best_so_far(rows, tmp_path / "a.png")
    assert "validation" in figure.axes[0].get_ylabel()
    assert "recorded rounds" in figure.axes[0].get_title(loc="left")
    _, gain = policy_lines(figure)["random"].get_data()
    assert float(np.asarray(gain)[-1]) == pytest.approx((0.7 - 0.4) / 0.6)


def test_policy_names_are_drawn_as_written_and_looks_do_not_repeat(tmp_path: Path) -> None:
    names = ["_hidden", "cost in $ and $", *(f"policy {number}" for number in range(10))]
    figure = plot_best_so_far([episode(name, 0, 0, 0.6) for name in names], tmp_path / "a.png")
    lines = policy_lines(figure).values()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)
    assert len(figure.legends[0].get_texts()) == len(names)


def test_interval_plot_shows_each_policy_twice(tmp_path: Path) -> None:
    comparison = summarise(two_by_two())
    figure = plot_intervals(comparison, tmp_path / "a.png")
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["random (reference)", "trained"]
    bars = [list(np.asarray(line.get_xdata(), dtype=float)) for line in left.get_lines()]
    for summary in comparison.policies:
        assert [summary.gain.low, summary.gain.high] in bars
    assert [text.get_text() for text in right.texts] == ["0.130", "0.025"]
    assert png_size(tmp_path / "a.png")[0] == 1350


def test_training_plot_has_dots_and_a_trailing_mean(tmp_path: Path) -> None:
    rows = [{"rounds": 3 * number, "reward": float(number), "gain": 0.1} for number in range(1, 9)]
    figure = plot_training(rows, tmp_path / "a.png")
    assert len(figure.axes) == 2
    dots, mean, *_ = figure.axes[0].get_lines()
    assert len(np.asarray(dots.get_xdata())) == 8
    assert np.asarray(mean.get_ydata()).tolist() == pytest.approx([3.0, 4.0, 5.0, 6.0])  # of the last five
    assert np.asarray(mean.get_xdata()).tolist() == [15.0, 18.0, 21.0, 24.0]
    assert png_size(tmp_path / "a.png")[0] == 1260
    with pytest.raises(ValueError, match="row 0: reward must be finite"):
        plot_training([{"rounds": 1, "reward": math.nan}], tmp_path / "b.png")
    with pytest.raises(ValueError, match="has no 'reward'"):
        plot_training([{"rounds": 1}], tmp_path / "b.png")


def test_verdict_follows_the_paired_interval() -> None:
    comparison = summarise(many({"random": 0.1, "same": 0.1, "good": 0.3, "bad": -0.1}, n_seeds=12))
    first, *rest = verdicts(comparison)
    assert "1 shown better, 1 shown worse, 1 with no difference shown" in first
    assert "not corrected" in first
    by_policy = {sentence.split(":")[0]: sentence for sentence in rest}
    assert "includes zero, so no difference is shown" in by_policy["same"]
    assert by_policy["good"].startswith("good: better than random on these instances")
    assert by_policy["bad"].startswith("bad: worse than random")


def test_verdict_calls_a_difference_on_few_seeds_a_hint() -> None:
    first, sentence, *_ = verdicts(summarise(many({"random": 0.0, "good": 0.5}, n_seeds=2)))
    assert "0 shown better, 0 shown worse, 1 with a hint" in first
    assert "2 seeds per instance are too few" in sentence


def test_verdict_claims_nothing_from_one_episode_or_one_policy() -> None:
    one = summarise([episode("random", 0, 0, 0.5), episode("good", 0, 0, 0.9)])
    assert "no difference is shown either way" in verdicts(one)[0]
    assert "nothing to compare" in verdicts(summarise([episode("random", 0, 0, 0.5)]))[0]


def test_verdict_does_not_compare_recorded_rounds_with_real_ones() -> None:
    rows = [replace(row, recorded=row.policy == "good") for row in many({"random": 0.0, "good": 0.5})]
    assert "not comparable" in verdicts(summarise(rows))[1]


@pytest.fixture(name="report")
def fixture_report(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes a report and reads its text."""

    def make(comparison: Comparison, training: dict[str, Any] | None = None, **settings: Any) -> str:
        path = write_report(tmp_path / "out", comparison, training, settings, "posttrain-gym compare --seeds 2 <x>")
        assert path == tmp_path / "out" / "report.html"
        return path.read_text(encoding="utf-8")

    return make


def test_report_shows_the_figures(report: Callable[..., str], tmp_path: Path) -> None:
    comparison = summarise(two_by_two())
    training = {"rows": [{"rounds": 5, "reward": 0.25}], "algorithm": "PPO"}
    page = report(comparison, training, budget={"limit": 20_000, "unit": "train_tokens"}, wall_seconds=3725.0)
    trained = comparison.policy("trained")
    assert trained.gain_over_reference is not None
    for estimate, style in ((trained.gain, ".3f"), (trained.regret, ".3f"), (trained.gain_over_reference, "+.3f")):
        cell = f"{estimate.value:{style}}"
        cell += f'<span class="interval">[{estimate.low:{style}}, {estimate.high:{style}}]</span>'
        assert f"<td>{cell}</td>" in page
    assert f"<td>{0.28:.3f}<span" in page  # the mean of 0.6, 0.3, 0.2 and 0.02
    for text in ("budget.limit", "20000", "1 h 02 min", "training: algorithm", "PPO", comparison.interval_label):
        assert text in page
    assert "posttrain-gym compare --seeds 2 &lt;x&gt;" in page
    assert "grpo by random on 0" in page and "0.500&nbsp;→&nbsp;0.600" in page  # equal on validation: the first one
    assert "<td>random</td><td>8</td><td>4</td><td>4</td>" in page  # rounds, failed, by data
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 3
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "Recorded rounds." not in page
    folder = tmp_path / "out"
    assert from_json((folder / "comparison.json").read_text()) == comparison
    assert read_parquet(folder) == comparison.episodes
    run = json.loads((folder / "run.json").read_text())
    assert run["settings"]["wall_seconds"] == 3725.0 and run["training"]["rows"][0]["reward"] == 0.25
    assert not list(folder.glob(".*"))


def test_report_stands_alone_and_escapes_names(report: Callable[..., str]) -> None:
    name = "<script>alert('x')</script>"
    rows = [replace(row, policy=name) if row.policy == "trained" else row for row in two_by_two(recorded=True)]
    rows = [replace(row, trajectory=(RoundRecord(1, 0.5, 0.5, 0.6, "<b>sft</b> & co"),)) for row in rows]
    page = report(summarise(rows), note="<img src=x>")
    assert "<script" not in page and "<b>" not in page and "<img src=x>" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page
    assert "&lt;b&gt;sft&lt;/b&gt; &amp; co" in page
    assert "Recorded rounds." in page and "[recorded]" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "http" not in re.sub(r"base64,[^\"]+", "", page)


def test_report_says_when_nothing_was_found_or_failed(report: Callable[..., str]) -> None:
    rows = [episode(policy, 0, 0, 0.5, failures={}, trajectory=(), rounds=0) for policy in ("random", "idle")]
    page = report(summarise(rows))
    assert "none improved on the base checkpoint" in page and "No round failed." in page
    assert 'class="interval"' not in page
