"""The fault table, the policy and the watch are checked without training anything."""

from __future__ import annotations

import ast
import json
import math
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import posttrain_gym.inner_trainers
from posttrain_gym.inner_trainers.base import CAUSES, Checkpoint, Failure, RoundReport, checkpoint_id
from posttrain_gym.inner_trainers.fault_kinds import FAULTS, RESPONSES, failure
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.faults import (
    FaultWatch,
    MemoryLimitError,
    RewardFault,
    ScorerFault,
    ToolFault,
    failure_from_exception,
)
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.time_limit import TimeLimitError, call_with_time_limit

LETTERS = 23
UNIFORM = math.log(LETTERS)


def watch(on_policy: bool = False, **policy: Any) -> FaultWatch:
    return FaultWatch(LETTERS, on_policy, FaultPolicy(**policy))


def first_fault(watched: FaultWatch, losses: list[float], **values: Any) -> Failure | None:
    for step, loss in enumerate(losses, start=1):
        fault = watched.observe(step, loss, 1.0, **values)
        if fault is not None:
            return fault
    return None


# The table -----------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_known_cause_and_says_why_a_response_does_not_fit() -> None:
    for kind, fault in FAULTS.items():
        assert fault.cause in CAUSES, kind
        assert fault.meaning.endswith("."), kind
        assert fault.responses[0] == "stop" and set(fault.responses) <= set(RESPONSES), kind
        assert bool(fault.unfit) == (set(fault.responses) != set(RESPONSES)), kind
    assert {kind for kind, fault in FAULTS.items() if "retry" in fault.responses} == {"diverged", "kl_runaway"}


def test_no_failure_is_labelled_outside_the_table() -> None:
    root = Path(str(posttrain_gym.inner_trainers.__file__)).parent.parent
    labelled = 0
    for path in [*root.glob("inner_trainers/**/*.py"), *root.glob("envs/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "failure" and isinstance(node.args[0], ast.Constant):
                    assert node.args[0].value in FAULTS, f"{path.name}, line {node.lineno}"
                    labelled += 1
                if node.func.id == "Failure" and node.args:
                    assert path.name == "fault_kinds.py", f"{path.name}, line {node.lineno}: use `failure`"
    assert labelled > 10


# The watch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_loss_that_is_no_number_diverges_at_its_step(bad: float, on_policy: bool) -> None:
    fault = first_fault(watch(on_policy), [4.59, 4.5, bad, 0.0, 0.0])
    assert fault == Failure("hyperparameter", "diverged", 3, f"the loss was {bad} at step 3")


def test_a_gradient_that_is_no_number_diverges() -> None:
    fault = watch().observe(1, 3.0, math.nan)
    assert fault == Failure("hyperparameter", "diverged", 1, "the gradient norm was nan at step 1")


def test_a_loss_that_explodes_and_then_lies_flat_is_caught_when_it_explodes() -> None:
    fault = first_fault(watch(), [4.59, 7e6, 2e7, *[UNIFORM] * 9])
    assert fault is not None
    assert (fault.kind, fault.step) == ("diverged", 2)
    assert fault.evidence == "the loss was 7e+06 at step 2, above 45.9 (first loss 4.59)"


def test_thresholds_of_explosion_come_from_the_policy() -> None:
    assert first_fault(watch(), [4.0, 39.9]) is None
    assert first_fault(watch(), [4.0, 40.1]) is not None
    assert first_fault(watch(explosion_factor=2.0), [4.0, 8.1]) is not None
    assert first_fault(watch(), [0.1, 10 * UNIFORM - 0.1]) is None  # what knows nothing is no explosion
    assert first_fault(watch(True), [0.1, 999.0]) is None
    assert first_fault(watch(True), [0.1, -1001.0]) is not None
    assert first_fault(watch(True, exploded_policy_loss=5.0), [0.1, -6.0]) is not None


def test_a_gradient_of_zero_with_different_rewards_is_a_collapse() -> None:
    assert watch(True).observe(1, 0.0, 0.0, 1.0) is None
    fault = watch(True).observe(1, 0.0, 0.0, 0.5)
    assert fault is not None and (fault.kind, fault.step) == ("diverged", 1)


def test_a_gradient_of_zero_at_a_loss_is_a_collapse_for_rows_too() -> None:
    fault = watch(False).observe(2, 3.135, 0.0)
    assert fault is not None and (fault.cause, fault.kind, fault.step) == ("hyperparameter", "diverged", 2)
    assert fault.evidence == "the gradient was exactly 0 at step 2 at a loss of 3.135: the weights are saturated"
    assert watch(False).observe(2, 0.0, 0.0) is None  # nothing left to learn: a teacher that equals the model
    assert watch(False).observe(2, 3.135, 1e-12) is None
    assert watch(True).observe(2, 0.5, 0.0) is None  # a policy's loss without any spread


def test_kl_beyond_its_limit_runs_away() -> None:
    assert watch(True, max_kl=2.0).observe(1, 0.0, 1.0, kl=2.0) is None
    assert watch(False, max_kl=2.0).observe(1, 0.5, 1.0, kl=50.0) is None  # KTO's is no divergence per token
    assert watch(True).observe(1, 0.0, 1.0, kl=9.9) is None
    by_default = watch(True).observe(1, 0.0, 1.0, kl=10.1)
    assert by_default is not None and by_default.kind == "kl_runaway"
    assert watch(True, max_kl=None).observe(1, 0.0, 1.0, kl=1e9) is None
    assert watch(True, max_kl=2.0).observe(1, 0.0, 1.0) is None
    fault = watch(True, max_kl=2.0).observe(4, 0.0, 1.0, kl=2.5)
    evidence = "the KL divergence per token was 2.5 at step 4, above 2"
    assert fault == Failure("hyperparameter", "kl_runaway", 4, evidence)
    assert watch(True, max_kl=2.0).observe(1, 0.0, 1.0, kl=math.nan) is not None


def test_signal_is_missed_from_the_start_only() -> None:
    silent = watch(True, no_signal_steps=3)
    assert [silent.observe(step, 0.0, 0.0, 1.0) is None for step in (1, 2, 3)] == [True, True, False]
    once = watch(True, no_signal_steps=3)
    for step, share in enumerate([1.0, 0.75, 1.0, 1.0, 1.0, 1.0], start=1):
        assert once.observe(step, 0.0, 1.0, share) is None
    assert once.round_ended(6) is None


def test_a_whole_round_without_signal_fails_by_default() -> None:
    silent = watch(True)
    for step in (1, 2):
        assert silent.observe(step, 0.0, 0.0, 1.0) is None
        assert silent.observe(step, 0.0, 0.0, None, reward_spread=0.5) is None  # a batch that is used again
    fault = silent.round_ended(4)
    assert fault is not None
    assert (fault.cause, fault.kind, fault.step) == ("algorithm_mismatch", "no_signal", 4)
    assert watch(True).round_ended(0) is None
    supervised = watch(False)
    assert supervised.observe(1, 1.0, 1.0, 1.0) is None
    assert supervised.round_ended(1) is None


def test_the_spread_of_the_batch_decides_where_nothing_is_compared_in_groups() -> None:
    silent, heard = watch(True), watch(True)
    silent.observe(1, 0.0, 1.0, reward_spread=0.0)
    heard.observe(1, 0.0, 1.0, reward_spread=0.1)
    assert silent.round_ended(1) is not None
    assert heard.round_ended(1) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardFault("judge out of memory"), "reward_function"),
        (ToolFault("t"), "tool_raised"),
        (ScorerFault("s"), "evaluation_raised"),
        (TimeLimitError("evaluation", 1.0, True), "time_limit"),
        (MemoryLimitError("m"), "memory_limit"),
        (MemoryError(), "oom"),
        (type("OutOfMemoryError", (RuntimeError,), {})("whatever it says"), "oom"),  # torch's, known by its name
        (RuntimeError("CUDA out of memory. Tried"), "oom"),
        (RuntimeError("probability tensor contains either `inf`"), "diverged"),
        (ValueError("v"), "trainer_raised"),
    ],
)
def test_exceptions_have_kinds(error: Exception, kind: str) -> None:
    fault = failure_from_exception(error, 7)
    assert (fault.cause, fault.kind, fault.step) == (FAULTS[kind].cause, kind, 7)


# The policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"responses": {"oom": "retry"}},
            "responses.oom: 'retry' does not fit: training has unwound when it is seen, and a trainer that has unwound "
            "cannot go on; what fits: stop, rollback.",
        ),
        ({"responses": {"no_signal": "rollback"}}, "responses.no_signal: 'rollback' does not fit: weights that saw no"),
        ({"responses": {"dverged": "stop"}}, "responses: unknown fault 'dverged'. Did you mean 'diverged'? Known: "),
        (
            {"responses": {"diverged": "rolback"}},
            "responses.diverged: unknown 'rolback'. Did you mean 'rollback'? Known: retry, rollback, stop.",
        ),
        ({"responses": "retry"}, "responses: expected kinds of faults with responses, for example"),
        ({"after_retries": "retry"}, "after_retries: unknown 'retry'."),
        ({"max_retries": 101}, "max_retries: expected an integer in [0, 100], got 101."),
        ({"max_retries": True}, "max_retries: expected an integer in [0, 100], got True (bool)."),
        ({"explosion_factor": 1.0}, "explosion_factor: expected a number in (1, 1e+06], got 1.0."),
        ({"max_kl": math.nan}, "max_kl: expected a number in (0, 1e+09], got nan."),
        ({"max_round_seconds": 0}, "max_round_seconds: expected a number in (0, 1e+09], got 0."),
        ({"max_memory_bytes": 0.5}, "max_memory_bytes: expected an integer in [1, 9223372036854775808], got 0.5"),
        ({"no_signal_steps": 0}, "no_signal_steps: expected an integer in [1, 100000], got 0."),
        ({"grace_seconds": -1}, "grace_seconds: expected a number in [0, 3600], got -1."),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        FaultPolicy(**settings)
    assert str(caught.value).startswith(message)


def test_a_policy_is_plain_data() -> None:
    policy = FaultPolicy({"oom": "rollback", "diverged": "retry"}, max_kl=1, no_signal_steps=5, max_round_seconds=60)
    data = json.loads(json.dumps(policy.to_dict()))
    assert FaultPolicy.from_dict(data) == policy == pickle.loads(pickle.dumps(policy))
    assert hash(FaultPolicy.from_dict(data)) == hash(policy)
    assert policy != FaultPolicy()
    with pytest.raises(ValueError, match=r"fault policy: unknown key 'max_retry'. Did you mean 'max_retries'\?"):
        FaultPolicy.from_dict({"max_retry": 1})
    with pytest.raises(TypeError):
        policy.responses["oom"] = "stop"  # type: ignore[index]


def test_retries_run_out_and_an_exception_cannot_be_retried() -> None:
    policy = FaultPolicy({"diverged": "retry", "oom": "rollback"}, max_retries=1, after_retries="rollback")
    assert policy.response("diverged", 0, unwound=False) == "retry"
    assert policy.response("diverged", 1, unwound=False) == "rollback"
    assert policy.response("diverged", 0, unwound=True) == "rollback"
    assert policy.response("oom", 0, unwound=True) == "rollback"
    assert policy.response("time_limit", 0, unwound=True) == "stop"
    assert policy.keeps_weights
    assert not FaultPolicy({"diverged": "stop"}).keeps_weights


# Reports -------------------------------------------------------------------------------------------------------------


def test_a_rescued_report_goes_through_json() -> None:
    fault = failure("diverged", 3, "the loss was nan at step 3")
    report = RoundReport(
        recipe=Recipe("sft", {"good": 1.0}),
        start="base",
        seed=0,
        checkpoint="c",
        steps=3,
        ended="rolled_back",
        rescued=(fault,),
        rolled_back_to=1,
        peak_memory_bytes=123,
    )
    data = json.loads(json.dumps(report.to_dict()))
    assert data["rescued"] == [
        {"cause": "hyperparameter", "kind": "diverged", "step": 3, "evidence": "the loss was nan at step 3"}
    ]
    assert RoundReport.from_dict(data) == report
    for name in ("rescued", "rolled_back_to", "peak_memory_bytes"):
        del data[name]  # a report of before
    assert RoundReport.from_dict(data).rescued == ()


def test_rescued_weights_have_another_id_than_the_same_rates_without() -> None:
    whole = checkpoint_id("r", 2, [1.0, 1.0])
    ids = {
        whole,
        checkpoint_id("r", 2, [1.0, 1.0], ["rollback at 2 to 1: diverged"]),
        checkpoint_id("r", 2, [1.0, 0.5]),
        checkpoint_id("r", 2, [1.0, 0.5], ["retry at 1 to 0: diverged"]),
        checkpoint_id("r", 2, [1.0, 0.5], ["retry at 1 to 0: kl_runaway"]),
    }
    assert whole == "r"
    assert len(ids) == 5
    assert Checkpoint(whole, None) != Checkpoint("s", None)


# Time ----------------------------------------------------------------------------------------------------------------


def test_a_call_without_a_limit_stays_on_its_thread_and_one_with_a_limit_returns_or_raises_the_same() -> None:
    assert call_with_time_limit(threading.current_thread, None, "it", 1.0) is threading.current_thread()
    assert call_with_time_limit(threading.current_thread, 5.0, "it", 1.0) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        call_with_time_limit(lambda: 1 / 0, 5.0, "it", 1.0)


def test_python_code_that_loops_is_ended_even_when_it_swallows_exceptions() -> None:
    for tries in (1, 2):
        caught = [0]

        def loop(tries: int = tries, caught: list[int] = caught) -> None:
            while caught[0] < tries - 1:
                try:
                    while True:
                        random.Random(0)
                except BaseException:
                    caught[0] += 1
            while True:
                pass

        with pytest.raises(TimeLimitError) as error:
            call_with_time_limit(loop, 0.05, "the loop", 5.0)
        assert error.value.ended
        assert str(error.value) == "the loop took longer than 0.05 seconds; its thread has ended"
        assert caught == [tries - 1]


def test_code_that_is_blocked_is_given_up_and_ends_when_it_wakes() -> None:
    woke, went_on, threads = threading.Event(), [], []

    def blocked() -> None:
        threads.append(threading.current_thread())
        woke.wait(0.5)
        went_on.append(1)

    with pytest.raises(TimeLimitError) as error:
        call_with_time_limit(blocked, 0.05, "the wait", 0.1)
    assert not error.value.ended
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert went_on == []
