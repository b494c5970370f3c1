"""Meta-training: resume after a kill, curves, refusals. Rounds are scripted where the trainer does not matter."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.journal import Journal
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.experiments.tensorboard_log import CurveWriter
from posttrain_gym.experiments.train import RoundEvent, TrainSettings, train

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
BUDGET = Budget(limit=60_000, max_rounds=4, patience=4)


def settings(rounds: int = 48, envs: int = 1, **changes: Any) -> TrainSettings:
    return TrainSettings(EnvSettings(task=SCRIPTED, budget=BUDGET), "maskable_ppo", rounds, envs, seed=3, **changes)


def policy_weights(path: Path) -> dict[str, np.ndarray]:
    from sb3_contrib import MaskablePPO

    model = MaskablePPO.load(path, device="cpu")
    return {name: value.numpy() for name, value in model.policy.state_dict().items()}


def points(folder: Path) -> list[tuple[str, int]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        found += [(v.tag, event.step) for event in EventFileLoader(str(file)).Load() for v in event.summary.value]
    return found


def test_a_resumed_run_gives_the_policy_of_an_unbroken_one(tmp_path: Path) -> None:
    whole, _ = train(settings(48), tmp_path / "whole")
    train(settings(16), tmp_path / "broken")
    events: list[RoundEvent] = []
    resumed, rows = train(settings(48), tmp_path / "broken", resume=True, on_round=events.append)
    assert [e.replayed for e in events if "round" in e.info][:10] == [True] * 10
    assert not events[-1].replayed
    assert sum(row["rounds"] > 0 for row in rows) == len(rows) > 5
    expected, got = policy_weights(whole), policy_weights(resumed)
    assert expected.keys() == got.keys()
    assert all(np.array_equal(expected[name], got[name]) for name in expected)


def test_curves_hold_each_step_once_after_a_resume(tmp_path: Path) -> None:
    train(settings(16), tmp_path)
    train(settings(32), tmp_path, resume=True)
    found = points(tmp_path / "tensorboard" / "meta")
    assert len(found) == len(set(found))
    assert sorted(step for tag, step in found if tag == "round/reward") == list(range(1, 33))
    assert any(tag.startswith("train/") for tag, _ in found)  # SB3's own figures
    inner = points(next((tmp_path / "tensorboard").glob("round-*")))
    assert {"inner/loss", "inner/learning_rate"} <= {tag for tag, _ in inner}
    assert len(inner) == len(set(inner))


def test_a_killed_run_loses_at_most_the_running_round(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from posttrain_gym.inner_trainers import testing
from posttrain_gym.experiments.train import train
from tests.test_train import settings
whole = testing.ScriptedSession.advance
def slow(self, steps=None):
    time.sleep(0.05)
    return whole(self, steps)
testing.ScriptedSession.advance = slow
train(settings(64), Path({str(tmp_path / "run")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    journal = tmp_path / "run" / "rounds-0.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b'"round_id"') >= 8:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    written = journal.read_bytes().count(b'"round_id"')
    assert 8 <= written < 64
    events: list[RoundEvent] = []
    resumed, _ = train(settings(64), tmp_path / "run", resume=True, on_round=events.append)
    assert sum(event.replayed for event in events) == written
    whole, _ = train(settings(64), tmp_path / "whole")
    expected, got = policy_weights(whole), policy_weights(resumed)
    assert all(np.array_equal(expected[name], got[name]) for name in expected)


def test_two_workers_are_two_processes_with_a_journal_each(tmp_path: Path) -> None:
    path, _ = train(settings(32, envs=2), tmp_path)
    assert path == tmp_path / "policy.zip"
    first, second = ((tmp_path / f"rounds-{i}.jsonl").read_text() for i in (0, 1))
    assert first.count('"round_id"') + second.count('"round_id"') <= 32
    assert json.loads(first.splitlines()[0])["seed"] != json.loads(second.splitlines()[0])["seed"]


def test_a_worker_that_dies_reaches_the_parent(tmp_path: Path) -> None:
    train(settings(32, envs=2), tmp_path)
    path = tmp_path / "rounds-1.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.unlink()
    journal = Journal(tmp_path, "1")
    journal.append("0.base", {**first, "task": "another"})
    journal.close()
    with pytest.raises(
        RuntimeError, match=r"worker process died: JournalMismatchError: .*rounds-1\.jsonl, entry 0\.base"
    ):
        train(settings(64, envs=2), tmp_path, resume=True)


def test_a_worker_that_is_killed_reaches_the_parent_and_nothing_hangs(tmp_path: Path) -> None:
    """Case C11: no hang; what was finished is kept and the run goes on."""

    def kill_one(event: RoundEvent) -> None:
        if event.number == 8:
            multiprocessing.active_children()[0].kill()

    with pytest.raises(RuntimeError, match=r"worker process died: it was ended from outside.*--resume goes on"):
        train(settings(32, envs=2), tmp_path, on_round=kill_one)
    assert not multiprocessing.active_children()
    events: list[RoundEvent] = []
    train(settings(32, envs=2), tmp_path, resume=True, on_round=events.append)
    assert sum(event.replayed for event in events) >= 6
    assert len(events) == 32


def test_ctrl_c_keeps_finished_rounds_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Real rounds on letters: the interrupt comes while TRL trains."""
    command = [sys.executable, "-m", "posttrain_gym", "train", "--out", "run", "--rounds", "64", "--budget", "60000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.lstrip().startswith("2/"):
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(timeout=120) == 130
    assert "finished rounds are kept" in said
    assert "Traceback" not in said
    written = (tmp_path / "run" / "rounds-0.jsonl").read_text().count('"key"')
    assert written >= 2
    assert set((tmp_path / "run").glob("checkpoints-0/*.partial")) == set()


def test_refusals_name_the_folder_and_the_way_out(tmp_path: Path) -> None:
    train(settings(16), tmp_path)
    with pytest.raises(ValueError, match="a run is there already; add --resume"):
        train(settings(16), tmp_path)
    with pytest.raises(ValueError, match=r"made with other settings; .*seed: 3 there, 4 now"):
        train(TrainSettings(settings().environment, "maskable_ppo", 16, 1, seed=4), tmp_path, resume=True)
    other = TrainSettings(EnvSettings(task="letters", budget=BUDGET), "maskable_ppo", 16, 1, seed=3)
    with pytest.raises(ValueError, match=r"environment\.task: .*ScriptedFamily.* there, 'letters' now"):
        train(other, tmp_path, resume=True)
    with pytest.raises(ValueError, match="the run has 16 rounds; --resume takes as many or more, got 8"):
        train(settings(8), tmp_path, resume=True)
    with pytest.raises(ValueError, match="no run to resume"):
        train(settings(16), tmp_path / "nothing", resume=True)
    with pytest.raises(ValueError, match=r"algo: unknown 'masked_ppo'.*maskable_ppo"):
        train(TrainSettings(settings().environment, "masked_ppo"), tmp_path / "x")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: damaged"):
        train(settings(16), tmp_path, resume=True)


def test_a_resume_that_stops_in_its_replay_keeps_the_newer_policy(tmp_path: Path) -> None:
    path, _ = train(settings(64), tmp_path)
    before = path.read_bytes()

    def stop(event: RoundEvent) -> None:
        if event.number == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings(64), tmp_path, resume=True, on_round=stop)
    assert path.read_bytes() == before


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from posttrain_gym.experiments.train import train
from tests.test_train import settings
train(settings(4096, envs=2), Path({str(tmp_path / "run")!r}), on_round=lambda event: time.sleep(0.02))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    journals = [tmp_path / "run" / f"rounds-{i}.jsonl" for i in (0, 1)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all(j.exists() and j.stat().st_size for j in journals):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while time.monotonic() < deadline and any(
        Path(f"/proc/{child}/fd").exists() and alive(child) for child in children
    ):
        time.sleep(0.05)
    assert not any(alive(child) for child in children)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_points_are_on_disk_when_write_returns(tmp_path: Path) -> None:
    """Case E05: a process killed after 5 logs leaves 5 points."""
    code = f"""
import os
from posttrain_gym.experiments.tensorboard_log import CurveWriter
writer = CurveWriter({str(tmp_path)!r})
for step in range(5):
    writer.write({{"loss": 1.0 / (step + 1)}}, step)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert points(tmp_path) == [("loss", step) for step in range(5)]


def test_a_cut_event_file_keeps_what_came_before_and_gets_the_rest(tmp_path: Path) -> None:
    writer = CurveWriter(tmp_path)
    for step in range(5):
        writer.write({"loss": float(step)}, step)
    writer.close()
    file = next(tmp_path.glob("events.*"))
    file.write_bytes(file.read_bytes()[:-7])
    again = CurveWriter(tmp_path)
    for step in range(6):
        again.write({"loss": float(step)}, step)
    again.write({"bad": float("nan")}, 0)
    again.close()
    assert sorted(points_until_damage(tmp_path)) == [("bad", 0)] + [("loss", step) for step in range(6)]
    files = set(tmp_path.iterdir())
    idle = CurveWriter(tmp_path)
    idle.write({"loss": 0.0}, 0)
    idle.close()
    assert set(tmp_path.iterdir()) == files


def points_until_damage(folder: Path) -> list[tuple[str, int]]:
    from posttrain_gym.experiments.tensorboard_log import _existing_points

    return list(_existing_points(folder))
