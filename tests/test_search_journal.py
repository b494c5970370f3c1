"""A killed search goes on where it was: whole lines load, finished rounds are not run again, weights are right."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.envs.journal import Journal, JournalInUseError
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.envs.search import JournalMismatchError
from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import (
    ScriptedFamily,
    ScriptedTask,
    ScriptedTrainer,
    TinyTask,
    write_tiny_checkpoint,
)

AMPLE = {"limit": 1e6, "max_rounds": 50, "patience": 50}


def make(folder: Path | str | Journal | None, **changes: Any) -> PostTrainingEnv:
    values: dict[str, Any] = {"task": ScriptedFamily(), "budget": AMPLE, "journal": folder, **changes}
    return PostTrainingEnv(**values)


def play(env: PostTrainingEnv, rounds: int, seed: int = 0, action_seed: int = 0) -> list[tuple[Any, ...]]:
    """Returns the trace of an episode of random actions: observations as bytes, rewards, ends and infos."""
    observation, info = env.reset(seed=seed)
    env.action_space.seed(action_seed)
    trace = [step_of(observation, 0.0, info)]
    for _ in range(rounds):
        action = env.action_space.sample()
        action["algorithm"] = 1 + int(action["algorithm"]) % 2
        observation, reward, terminated, _, info = env.step(action)
        trace.append(step_of(observation, reward, info))
        if terminated:
            break
    return trace


def step_of(observation: dict[str, np.ndarray], reward: float, info: dict[str, Any]) -> tuple[Any, ...]:
    facts = {name: value for name, value in info.items() if name != "replayed"}
    text = json.dumps(facts, sort_keys=True, default=lambda array: array.tolist())
    return {name: values.tobytes() for name, values in observation.items()}, reward, text


def launched(env: PostTrainingEnv) -> int:
    return env.trainer.launched  # type: ignore[attr-defined, no-any-return]


# D07: cut journals ----------------------------------------------------------------------------------------------------


def test_a_journal_cut_at_every_byte_loads_all_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append(f"0.{number}", {"text": "é\r\n" * number, "number": number})
    whole = journal.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 3
    for length in range(len(whole) + 1):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "rounds-0.jsonl").write_bytes(whole[:length])
        kept = sum(end <= length for end in ends)
        cut = length - ([0, *ends][kept])
        loaded = Journal(folder)
        assert (len(loaded), loaded.set_aside) == (kept, cut), length
        damaged = folder / "rounds-0.damaged"
        assert (damaged.read_bytes() if cut else b"") == whole[length - cut : length]
        loaded.append("0.9", {"number": 9})
        again = Journal(folder)
        assert (len(again), again.set_aside) == (kept + 1, 0)
        assert [again.entry(f"0.{n}") is not None for n in (0, 1, 2, 9)] == [kept > 0, kept > 1, kept > 2, True]
        assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("junk", [b"\x00" * 20 + b"\n", b"{}\n", b"[1]\n", b'{"key": 3}\n', b"\xff\xfe\n", b"\n"])
def test_a_damaged_line_between_whole_ones_is_set_aside(tmp_path: Path, junk: bytes) -> None:
    journal = Journal(tmp_path)
    journal.append("0.0", {"n": 0})
    with open(journal.path, "ab") as file:
        file.write(junk)
    Journal(tmp_path)  # sets aside and rewrites
    journal = Journal(tmp_path)
    journal.append("0.1", {"n": 1})
    assert [Journal(tmp_path).entry(f"0.{n}") is not None for n in (0, 1)] == [True, True]
    assert (tmp_path / "rounds-0.damaged").read_bytes() == junk


def test_entries_hold_what_json_has_no_word_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("0.0", {"instance": {"folder": Path("a/b")}})
    assert Journal(tmp_path).entry("0.0") == journal.entry("0.0")


# Replay ---------------------------------------------------------------------------------------------------------------


def test_a_repeated_episode_launches_nothing_and_goes_on_from_the_right_weights(tmp_path: Path) -> None:
    unbroken = make(None)
    expected = play(unbroken, 10)
    first = make(tmp_path)
    assert play(first, 6) == expected[:7]
    second = make(str(tmp_path))
    assert play(second, 10) == expected
    assert (launched(unbroken), launched(first), launched(second)) == (10, 6, 4)
    assert [outcome.replayed for outcome in second.search.outcomes] == [True] * 6 + [False] * 4
    third = make(tmp_path)
    assert play(third, 10) == expected
    assert launched(third) == 0
    for name in ("base", "best", "latest"):
        restored, original = third.search.weights_of(name), unbroken.search.weights_of(name)
        assert restored.id == original.id
        assert np.array_equal(restored.weights["scores"], original.weights["scores"])


def test_every_kill_point_gives_the_same_episode(tmp_path: Path) -> None:
    expected = play(make(None), 6)
    for stopped_after in range(7):
        folder = tmp_path / str(stopped_after)
        play(make(folder), stopped_after)
        env = make(folder)
        assert play(env, 6) == expected
        assert launched(env) == 6 - stopped_after


def test_episodes_follow_one_another_in_the_journal(tmp_path: Path) -> None:
    written = [play(env, 3, seed=s, action_seed=s) for env in [make(tmp_path)] for s in (0, 1, 2)]
    second = make(tmp_path)
    assert [play(second, 3, seed=s, action_seed=s) for s in (0, 1, 2)] == written
    assert launched(second) == 0
    assert len(Journal(tmp_path).reports()) == 9


def test_failed_rounds_are_replayed_too(tmp_path: Path) -> None:
    faults = {1: [float("nan")], 2: MemoryError("out of memory"), 3: [1.0, float("inf")]}
    written = play(make(tmp_path, trainer=ScriptedTrainer(faults=faults)), 6)
    second = make(tmp_path)
    repeated = play(second, 6)
    assert launched(second) == 0
    for (one, reward, _), (other, other_reward, _) in zip(written, repeated, strict=True):
        assert (one, reward) == (other, other_reward)
    kinds = [None if r.failure is None else r.failure.kind for r in Journal(tmp_path).reports()]
    assert kinds == [None, "diverged", "oom", "diverged", None, None]


def test_replay_keeps_the_weights_of_rounds_still_to_come(tmp_path: Path) -> None:
    """Cached and refused rounds are not in the journal; answering them while it is read back must delete nothing."""

    def actions(env: PostTrainingEnv) -> list[dict[str, Any]]:
        first = env.encode_recipe(env.space.recipe("sft", start="base", learning_rate=1e-3, steps=40))
        later = env.encode_recipe(env.space.recipe("sft", start="latest", learning_rate=1e-3, steps=40))
        return [first, first, later, later]

    env = make(tmp_path)
    env.reset(seed=0)
    for action in actions(env):
        env.step(action)
    files = {path.name for path in tmp_path.glob("checkpoints-0/*")}
    again = make(tmp_path)
    again.reset(seed=0)
    for action in actions(again):
        again.step(action)
    assert {path.name for path in tmp_path.glob("checkpoints-0/*")} == files
    assert launched(again) == 0
    again.search.weights_of("latest")
    assert launched(again) == 0


def test_a_journal_can_be_shared_under_names_of_its_own(tmp_path: Path) -> None:
    one, two = make(Journal(tmp_path, "1")), make(Journal(tmp_path, "2"))
    play(one, 2, seed=1)
    play(two, 2, seed=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints-1",
        "checkpoints-2",
        "rounds-1.jsonl",
        "rounds-1.lock",
        "rounds-2.jsonl",
        "rounds-2.lock",
    ]


@pytest.mark.parametrize(
    ("changes", "seed", "action_seed", "entry"),
    [
        ({}, 1, 0, "0.base"),
        ({"task": ScriptedTask(7)}, 0, 0, "0.base"),
        ({"task": ScriptedTask(0, answer="edited")}, 0, 0, "0.base"),
        ({"budget": {**AMPLE, "limit": 5e5}}, 0, 0, "0.base"),
        ({"budget": {**AMPLE, "unit": "flops"}}, 0, 0, "0.base"),
        ({}, 0, 1, "0.0"),
    ],
)
def test_the_journal_of_another_run_is_refused_by_file_and_entry(
    tmp_path: Path, changes: dict[str, Any], seed: int, action_seed: int, entry: str
) -> None:
    play(make(tmp_path), 2)
    with pytest.raises(JournalMismatchError, match=rf"rounds-0\.jsonl, entry {entry}: .*use a new folder"):
        play(make(tmp_path, **changes), 2, seed, action_seed)


def test_more_rounds_or_patience_may_be_granted_on_resume(tmp_path: Path) -> None:
    play(make(tmp_path, budget={**AMPLE, "max_rounds": 2}), 2)
    env = make(tmp_path)
    play(env, 4)
    assert launched(env) == 2


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False])
def test_only_checkpoints_that_can_be_started_from_keep_their_weights(tmp_path: Path, reuse: bool) -> None:
    env = make(tmp_path, reuse=reuse)
    for rounds in range(1, 9):
        play(env, rounds, seed=rounds)
        startable = {c.id for c in env.search.checkpoints.values()}
        if reuse:  # an equal round makes any finished one the latest again
            startable |= {o.report.checkpoint for o in env.search.outcomes if o.report.checkpoint is not None}
        assert {path.stem.split("-")[0] for path in tmp_path.glob("checkpoints-0/*")} == startable - {"base"}
        assert set(env.search.records.kept) == startable | {"base"}
    assert (len(startable) == 9) == reuse


def test_a_cached_round_is_continued_after_a_restart_without_training_it_again(tmp_path: Path) -> None:
    def actions(env: PostTrainingEnv) -> list[dict[str, Any]]:
        one, two = (env.space.recipe("sft", start="base", learning_rate=1e-3, steps=n) for n in (40, 20))
        onwards = env.space.recipe("sft", start="latest", learning_rate=5e-4)
        return [env.encode_recipe(recipe) for recipe in (one, two, one, onwards)]

    def run(env: PostTrainingEnv, count: int) -> list[Any]:
        env.reset(seed=0)
        return [env.step(action)[4]["round"]["score"] for action in actions(env)[:count]]

    expected = run(make(None), 4)
    first = make(tmp_path)
    run(first, 2)
    second = make(tmp_path)
    assert run(second, 4) == expected
    assert (launched(first), launched(second)) == (2, 1)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign"])
def test_weights_that_are_missing_or_damaged_are_made_again_once(tmp_path: Path, damage: str) -> None:
    expected = play(make(None), 7)
    play(make(tmp_path), 5)
    for path in tmp_path.glob("checkpoints-0/*.safetensors"):
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes({"empty": b"", "cut": data[:-1], "foreign": b"PK\x03\x04" * 20}[damage])
    env = make(tmp_path)
    assert play(env, 7) == expected
    assert launched(env) <= 2 + 5  # two new rounds, and each of the five lost ones at most once
    env.search.weights_of("best")
    count = launched(env)
    env.search.weights_of("best")
    assert launched(env) == count


def test_weights_come_back_with_their_kinds(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T, "b": torch.tensor(1.5)}
    journal.save_weights(Checkpoint("t", tensors))
    journal.save_weights(Checkpoint("n", {"x": np.arange(6.0).reshape(2, 3).T}))
    journal.save_weights(Checkpoint("o", object()))
    journal.save_weights(Checkpoint("none", None))
    restored = journal.weights("t")
    assert restored is not None
    assert all(torch.equal(restored[k], tensors[k]) and restored[k].dtype == tensors[k].dtype for k in tensors)
    arrays = journal.weights("n")
    assert arrays is not None and np.array_equal(arrays["x"], np.arange(6.0).reshape(2, 3).T)
    assert journal.weights("o") is None and journal.weights("none") is None


def graded(row: Mapping[str, Any], completion: str) -> float:
    """A reward with spread on a model that has learnt little."""
    return sum(map(ord, completion)) % 7 / 7


def real_episode(task: TinyTask, folder: Path | None, rounds: int) -> PostTrainingEnv:
    """Returns an environment after real TRL rounds on a tiny checkpoint: SFT, SFT on top, GRPO on top."""
    env = PostTrainingEnv(
        task, evaluator={"seeds": (0,), "samples_per_seed": 2, "k": 2}, budget={"limit": 1e6}, journal=folder
    )
    env.reset(seed=3)
    for algorithm in ("sft", "sft", "grpo")[:rounds]:
        recipe = env.space.recipe(
            algorithm, start="latest", mix={"good": 1.0}, steps=10, batch_size=16, num_generations=4, learning_rate=1e-3
        )
        facts = env.step(env.encode_recipe(recipe))[4]["round"]
        assert facts["ended"] == "finished"
    return env


def test_real_weights_are_made_again_bit_for_bit(tmp_path: Path) -> None:
    task = TinyTask(write_tiny_checkpoint(tmp_path / "model"), verifier=graded)
    unbroken = real_episode(task, None, 3)
    real_episode(task, tmp_path / "kept", 2)
    real_episode(task, tmp_path / "lost", 2)
    lost = list(tmp_path.glob("lost/checkpoints-0/*.safetensors"))
    assert lost
    for path in lost:
        path.unlink()
    for name in ("kept", "lost"):
        env = real_episode(task, tmp_path / name, 3)
        assert [outcome.replayed for outcome in env.search.outcomes] == [True, True, False]
        ours, theirs = (e.search.weights_of("latest") for e in (env, unbroken))
        assert ours.id == theirs.id
        assert sorted(ours.weights) == sorted(theirs.weights)
        assert all(torch.equal(ours.weights[key], theirs.weights[key]) for key in theirs.weights)
        assert env.search.scorecards == unbroken.search.scorecards


# Other trainers and other processes -----------------------------------------------------------------------------------


def test_the_journal_of_another_evaluator_is_refused(tmp_path: Path) -> None:
    """The same cost, so that no bound would tell them apart."""
    task = TinyTask(write_tiny_checkpoint(tmp_path / "model"))

    def started(**evaluator: Any) -> PostTrainingEnv:
        settings = {"seeds": (0,), "samples_per_seed": 2, "k": 2, **evaluator}
        env = PostTrainingEnv(task, evaluator=settings, budget={"limit": 1e6}, journal=tmp_path / "run")
        env.reset(seed=3)
        return env

    started()
    started()
    for other in ({"seeds": (1,)}, {"temperature": 0.5}, {"k": 1}):
        with pytest.raises(
            JournalMismatchError, match=r"rounds-0\.jsonl, entry 0\.base: .*another task, seed, trainer"
        ):
            started(**other)


def test_a_round_of_another_trainer_is_refused(tmp_path: Path) -> None:
    class Other(ScriptedTrainer):
        pass

    play(make(tmp_path), 2)
    lines = (tmp_path / "rounds-0.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["trainer"] for line in lines] == [{"trainer": "ScriptedTrainer"}] * 3
    (tmp_path / "rounds-0.jsonl").write_text(lines[0].replace("ScriptedTrainer", "Other") + "".join(lines[1:]))
    with pytest.raises(JournalMismatchError, match=r"entry 0\.0: "):
        play(make(tmp_path, trainer=Other()), 2)


HOLDER = """
import sys, time
from posttrain_gym.envs.journal import Journal, JournalInUseError
journal = Journal(sys.argv[1])
journal.append("0.0", {})
print("open", flush=True)
sys.stdin.readline()
journal.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    def holder() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        return process

    first = holder()
    with pytest.raises(JournalInUseError, match=rf"another process is writing to {tmp_path} \(rounds-0\)"):
        make(tmp_path)
    assert len(Journal(tmp_path, "1")) == 0  # another name is another file
    assert first.stdin is not None and first.stdout is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "closed\n"
    assert len(Journal(tmp_path)) == 1  # and is gone again with the object
    first.kill()
    first.communicate()
    second = holder()
    second.kill()  # a dead process holds nothing
    second.communicate()
    env = make(tmp_path)
    env.close()
    third = holder()  # while this process lives on
    third.kill()
    third.communicate()
    with pytest.raises(ValueError, match=r"rounds-0\.jsonl: it is closed"):
        env.reset()


def test_a_journal_sent_to_another_process_is_opened_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "2")
    journal.append("0.0", {"n": 1})
    again = pickle.loads(pickle.dumps(journal))
    assert (again.path, again.entry("0.0")) == (journal.path, journal.entry("0.0"))
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, pickle.dumps(journal).hex()], capture_output=True, text=True)
    assert "JournalInUseError: another process is writing to" in done.stderr


def test_damaged_bytes_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.append("0.0", {})
    journal.close()
    with open(journal.path, "ab") as file:
        file.write(b'{"key": "0.')
    assert Journal(tmp_path).set_aside == 11
    assert Journal(tmp_path).set_aside == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{tmp_path / 'rounds-0.jsonl'}: 11 damaged bytes were moved to rounds-0.damaged"
    ]


# Killed processes -----------------------------------------------------------------------------------------------------

KILLED = """
import sys
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTrainer
env = PostTrainingEnv(
    ScriptedFamily(), trainer=ScriptedTrainer(step_seconds=float(sys.argv[2])), journal=sys.argv[1],
    budget={"limit": 1e6, "max_rounds": 50, "patience": 50},
)
env.reset(seed=0)
for number, steps in enumerate((10, 11, 60, 12)):
    print("begin", number, flush=True)
    info = env.step(env.encode_recipe(env.space.recipe("sft", start="latest", steps=steps, learning_rate=1e-3)))[4]
    print("end", number, info["replayed"], info["round"]["score"], flush=True)
"""


def test_kill_in_the_third_round_loses_that_round_alone(tmp_path: Path) -> None:
    def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
        )

    unbroken = start(tmp_path / "unbroken", 0.0).communicate(timeout=60)[0].splitlines()
    process = start(tmp_path / "killed", 0.02)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "begin 2":
            break
    time.sleep(0.3)  # round 3 sleeps for 1.2 s
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert [report.steps for report in Journal(tmp_path / "killed").reports()] == [10, 11]
    resumed = start(tmp_path / "killed", 0.0).communicate(timeout=60)[0].splitlines()
    assert [line.split()[2] for line in resumed if line.startswith("end")] == ["True", "True", "False", "False"]
    scores = [[line.split()[3] for line in lines if line.startswith("end")] for lines in (unbroken, resumed)]
    assert scores[0] == scores[1]
    assert len(Journal(tmp_path / "killed").reports()) == 4


# The ledger -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(limit=st.floats(200, 40_000), rounds=st.integers(1, 8), cut=st.integers(0, 8), seed=st.integers(0, 1000))
def test_a_resumed_ledger_is_the_unbroken_one(
    tmp_path_factory: pytest.TempPathFactory, limit: float, rounds: int, cut: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    budget = {"limit": limit, "max_rounds": rounds, "patience": rounds}
    unbroken = make(None, budget=budget)
    if unbroken.reset(seed=seed)[1]["ended"] is not None:
        return
    expected = play(unbroken, rounds, seed, seed)
    play(make(folder, budget=budget), min(cut, rounds), seed, seed)
    resumed = make(folder, budget=budget)
    assert play(resumed, rounds, seed, seed) == expected
    ledger = resumed.search.ledger
    assert ledger.entries == unbroken.search.ledger.entries
    assert ledger.spent == sum(amount for _, amount in ledger.entries)
    assert ledger.spent <= limit


def test_nothing_is_written_without_a_journal(tmp_path: Path) -> None:
    before = set(os.listdir(tmp_path))
    previous = os.getcwd()
    os.chdir(tmp_path)
    try:
        play(make(None), 3)
    finally:
        os.chdir(previous)
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("text", [b'"n": 7', b'"key": "0.0"', b"crc32"])
def test_a_line_of_which_one_byte_changed_is_set_aside(tmp_path: Path, text: bytes) -> None:
    """An edited score, key or checksum is not believed; the lines around it are."""
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append(f"0.{number}", {"n": 7 + number})
    journal.close()
    raw = journal.path.read_bytes()
    at = raw.index(text) + len(text) - 1
    journal.path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    again = Journal(tmp_path)
    assert again.set_aside == len(raw.splitlines(keepends=True)[0])
    assert [again.entry(f"0.{number}") is None for number in range(3)] == [True, False, False]


def test_another_format_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append("0.0", {})
    monkeypatch.setattr("posttrain_gym.envs.journal.FORMAT", 2)
    with pytest.raises(ValueError, match=r"rounds-0\.jsonl, line 1: format 1, this version reads 2"):
        Journal(tmp_path)


def test_weights_of_which_one_byte_changed_are_made_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.save_weights(Checkpoint("abc", {"x": np.arange(4.0)}))
    (path,) = tmp_path.glob("checkpoints-0/*")
    assert np.array_equal(journal.weights("abc")["x"], np.arange(4.0))  # type: ignore[index]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # still a sound file, with another number in it
    assert journal.weights("abc") is None
    path.unlink()
    path.mkdir()
    assert journal.weights("abc") is None
    journal.keep_only(())


def test_a_task_with_nothing_to_train_on_is_refused_by_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    monkeypatch.setattr(
        ScriptedTask, "sources", lambda self: [Source(name, {"preferences": pairs}) for name in ("left", "right")]
    )
    monkeypatch.setattr(ScriptedTrainer, "usable_sources", lambda self, task, algorithm: ())
    with pytest.raises(ValueError, match=r"no source has rows that grpo or sft trains on; .*'left': \['preferences'\]"):
        PostTrainingEnv(ScriptedFamily(), trainer=ScriptedTrainer()).reset(seed=0)
