"""The command line as a person meets it: real processes, exit codes, what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from posttrain_gym.experiments.cli import main
from posttrain_gym.inner_trainers.recipe_file import load_recipe

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
SMALL = ["--task", SCRIPTED, "--budget", "60000", "--max-rounds", "4"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "posttrain_gym", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, check=False)


def refused(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 2
) -> str:
    """Run the command line in this process, which is warm; return what it said on standard error, in one line."""
    monkeypatch.setattr(sys, "argv", ["posttrain-gym", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    return " ".join(capsys.readouterr().err.split())


def ok(*arguments: str, cwd: Path | None = None) -> str:
    done = run(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_version_and_lists() -> None:
    shown = ok("--help")
    for command in ("demo", "train", "evaluate", "compare", "run-recipe", "replay", "tasks", "policies", "bench"):
        assert command in shown
    assert ok("--version").strip() == "0.1.0"
    assert [row["name"] for row in json.loads(ok("tasks", "--json"))] == ["calculator", "letters", "smol-reasoning"]
    names = [row["name"] for row in json.loads(ok("policies", "--json"))]
    assert {"random", "fixed", "shortlist", "greedy-sft-then-grpo", "maskable_ppo", "sac", "rules:default"} <= set(
        names
    )
    drawn = json.loads(ok("tasks", "letters", "--instance", "3"))
    assert set(drawn["sources"]) == {"instruction", "multi_turn", "reasoning", "safety", "web"}
    assert drawn["benchmark"]["validation"] == 128


def test_the_other_command_has_its_own_help(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    command = [sys.executable, "-c", "from posttrain_gym.experiments.agent_cli import main; main()"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "inspect-data" in shown
    done = subprocess.run(
        [*command, "inspect-data", "a.jsonl"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert (done.returncode, "prompt-completion" in done.stdout) == (0, True), done.stderr
    gone = subprocess.run(
        [*command, "inspect-data", "b.jsonl"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert gone.returncode == 2
    assert "there is no such file. Did you mean 'a.jsonl'?" in " ".join(gone.stderr.split())


def test_train_then_evaluate_then_compare(tmp_path: Path) -> None:
    shown = ok("train", *SMALL, "--out", "run", "--rounds", "16", cwd=tmp_path)
    assert "16/16" in shown
    assert "policy: run/policy.zip" in shown
    again = run("train", *SMALL, "--out", "run", "--rounds", "16", cwd=tmp_path)
    assert again.returncode == 2
    assert "add --resume" in again.stderr
    resumed = ok("train", *SMALL, "--out", "run", "--rounds", "32", "--resume", cwd=tmp_path)
    assert resumed.count("(from the journal)") == 16 - resumed.split("17/32")[0].count("  stop  ")
    result = json.loads(ok("evaluate", "run/policy.zip", *SMALL, "--instances", "100-101", "--json", cwd=tmp_path))
    assert [episode["instance"] for episode in result["episodes"]] == [100, 101]
    shown = ok(
        "compare",
        "random",
        "fixed",
        "run/policy.zip",
        *SMALL,
        "--instances",
        "100,101",
        "--seeds",
        "0-1",
        "--out",
        "cmp",
        cwd=tmp_path,
    )
    assert "trained (run)" in shown
    report = (tmp_path / "cmp" / "report.html").read_text()
    assert "trained (run)" in report
    for name in ("best_so_far.png", "intervals.png", "episodes.parquet", "rounds.parquet", "comparison.json"):
        assert (tmp_path / "cmp" / name).stat().st_size > 0
    quiet = ok(
        "compare",
        "random",
        "fixed",
        "run/policy.zip",
        *SMALL,
        "--instances",
        "100,101",
        "--seeds",
        "0-1",
        "--out",
        "cmp",
        "--json",
        cwd=tmp_path,
    )
    assert json.loads(quiet) == json.loads((tmp_path / "cmp" / "comparison.json").read_text())


def test_run_recipe_trains_for_real_and_reports_both_splits(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: grpo\nmix: {web: 1.0}\nsteps: 5\nlearning_rate: 4e-4\nbatch_size: 32\n")
    result = json.loads(
        ok("run-recipe", str(recipe), "--instance", "1", "--save", str(tmp_path / "w.safetensors"), "--json")
    )
    assert result["ended"] == "finished"
    assert result["steps"] == 5
    assert result["recipe"]["learning_rate"] == 4e-4
    assert set(result["scores"]) == {"validation", "test"}
    assert (tmp_path / "w.safetensors").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("evaluate", "fixd"), "Did you mean 'fixed'"),
        (("evaluate", "fixed", "--task", "leters"), "Did you mean 'letters'"),
        (("evaluate", "fixed", "--task", "nowhere:Task"), "module 'nowhere' cannot be imported"),
        (("evaluate", "fixed", "--budget", "0"), "budget.limit: expected a number in (0"),
        (("evaluate", "fixed", "--budget", "nan"), "budget.limit: expected a number in (0"),
        (("evaluate", "fixed", "--unit", "tokens"), "Did you mean 'train_tokens'"),
        (("evaluate", "fixed", "--max-rounds", "0"), "budget.max_rounds: expected an integer in [1"),
        (("evaluate", "fixed", "--price", "-1"), "price: expected a number in [0"),
        (("evaluate", "fixed", "--samples", "0"), "--samples: expected at least 1"),
        (("evaluate", "fixed", "--seeds", "one"), "--seeds: expected numbers"),
        (("evaluate", "missing.zip"), "no such file"),
        (("train", "--out", "x", "--algo", "dqm"), "algo: unknown 'dqm'"),
        (("train", "--out", "x", "--devices", "cuda:0"), "no CUDA device is visible"),
        (("bench", "rond"), "Did you mean 'round'"),
        (
            ("evaluate", "fixed", "--seeds", "5-3"),
            "--seeds: expected a rising range of at most 10000 numbers, got '5-3'",
        ),
        (("evaluate", "fixed", "--instances", "0-999999999"), "expected a rising range of at most 10000 numbers"),
        (("evaluate", "fixed", "--seeds", "²"), "--seeds: expected numbers"),
        (("train", "--out", "x", "--seed", "-1"), "seed: expected an integer in [0, 2147483647], got -1"),
        (("train", "--out", ""), "out: expected the name of a folder"),
        (("train", "--out", "file/x"), "file is a file; expected a folder"),
        (("compare", "fixed", "--out", "file"), "file is a file; expected a folder"),
        (("compare", "fixed", "--out", "x", "--instances", "10000,20000"), "letters has seeds [0, 10000)"),
        (("compare", "fixed", "--out", "x", "--reference", "random"), "'random' is not among the compared policies"),
        (("evaluate", "fixed:nothing.yaml"), "recipe nothing.yaml: no such file"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert expected in refused(arguments, monkeypatch, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # a refusal leaves nothing behind


def test_an_error_leaves_the_process_with_its_exit_code_and_no_traceback() -> None:
    done = run("evaluate", "fixd")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "algorithm: sft\nmix: {web: 1}\nlearning_rat: 1e-3\n",
            "unknown key 'learning_rat'. Did you mean 'learning_rate'",
        ),
        ("algorithm: sft\nmix: {web: 0.5}\n", "weights must sum to 1"),
        ("algorithm: sfd\nmix: {web: 1}\n", "algorithm: unknown 'sfd'. Did you mean 'sft'"),
        ("algorithm: sft\nmix: {wob: 1}\n", "Did you mean 'web'"),
        ("algorithm: sft\nmix: {web: 1}\nsteps: yes\n", "steps: expected an integer"),
        ("algorithm: sft\nmix: {web: 1}\nlearning_rate: fast\n", "learning_rate: expected a number, got 'fast'"),
        ("algorithm: grpo\nmix: {web: 1}\nbatch_size: 6\nnum_generations: 4\n", "allowed: 2, 3, 6"),
        (
            "algorithm: sft\nmix: {web: 1}\nsteps: 2024-99-99\n",
            "recipe.yaml, line 3, column 8: steps: expected an integer, got '2024-99-99'. It looks like a date.",
        ),
        (
            "algorithm: sft\nmix: {web: 1}\npacking: no\n",
            "recipe.yaml, line 3, column 10: packing: expected true or false, got 'no'. Write false.",
        ),
        (
            "algorithm: sft\nmix: {web: 1}\nsteps: 010\n",
            "line 3, column 8: steps: expected an integer, got '010'. Write 10, or 8 if it was meant in octal.",
        ),
        (
            "algorithm: sft\nmix: {web: 1}\nwarmup_steps: 21\n",
            "line 3, column 15: warmup_steps: expected an integer in [0, 20]",
        ),
        ("algorithm: sft\nmix: {web: 1_0}\n", "line 2, column 12: mix.web: expected a number, got '1_0'. Write 10."),
        ("- sft\n", "expected keys like algorithm and mix"),
        ("algorithm: [\n", "not readable as YAML"),
    ],
)
def test_a_bad_recipe_file_is_named_with_the_fix(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert expected in refused(("run-recipe", str(path)), monkeypatch, capsys)


def test_yaml_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {web: 1e0}\nlearning_rate: 1e-4\nsteps: 1e2\ntemperature: 1e-1\n")
    recipe = load_recipe(path)
    assert (recipe.learning_rate, recipe.steps, recipe.temperature, dict(recipe.mix)) == (1e-4, 100, 0.1, {"web": 1.0})


def test_a_failed_recipe_is_told_by_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {web: 1}\nlearning_rate: 1000\nsteps: 4\n")
    done = run("run-recipe", str(path), "--save", str(tmp_path / "w.safetensors"), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["failure"]["kind"] == "diverged"
    assert not (tmp_path / "w.safetensors").exists()


def test_a_polite_end_is_an_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttrain_gym", "train", *SMALL, "--out", "[bold]run", "--rounds", "100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "run folder [bold]run" in process.stdout.readline()
        for line in process.stdout:
            if line.lstrip().startswith("20/"):
                break
        process.terminate()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "finished rounds are kept" in said
    assert (tmp_path / "[bold]run" / "rounds-0.jsonl").read_text().count("\n") >= 20


def test_text_fields_of_a_recipe_file_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "algorithm: dpo\nmix: {web: 1}\nloss: sigmoid+sft\nlora_rank: 4\nlora_adapter: stack\ncritic: none\n"
    )
    recipe = load_recipe(path)
    assert (recipe.loss, recipe.lora_rank, recipe.lora_adapter, recipe.critic) == ("sigmoid+sft", 4, "stack", "none")
    path.write_text(json.dumps(recipe.to_dict()))
    assert load_recipe(path) == recipe


def test_a_recipe_file_with_a_key_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    from posttrain_gym.inner_trainers.recipe_file import load_recipe

    path = tmp_path / "twice.yaml"
    path.write_text("algorithm: sft\nmix: {web: 1.0}\nsteps: 3\nsteps: 4\n")
    with pytest.raises(ValueError, match=r"line 4, column 1: key 'steps' is there twice, first in line 3"):
        load_recipe(path)


def test_a_policy_that_adjusts_rounds_is_trained_and_evaluated_in_its_environment(tmp_path: Path) -> None:
    task = ("--task", "posttrain_gym.inner_trainers.testing:ScriptedFamily")
    (tmp_path / "recipe.yaml").write_text("{algorithm: sft, mix: {left: 1.0}, steps: 10, learning_rate: 1.0e-4}")
    given = ("--env", "in-loop", "--recipe", "recipe.yaml", "--interval", "5")
    shown = ok("train", *task, *given, "--algo", "ppo", "--out", "run", "--rounds", "16", cwd=tmp_path)
    assert (
        "posttrain-gym evaluate" in shown and "--env in-loop --recipe recipe.yaml --interval 5 run/policy.zip" in shown
    )
    rows = json.loads(ok("evaluate", *task, *given, "run/policy.zip", "--instances", "100", "--json", cwd=tmp_path))
    assert [entry["episodes"] for entry in rows["policies"]] == [1]
    for arguments, expected in (
        ((*given, "random"), "'random' chooses recipes and adjusts no round; with --env in-loop give the .zip"),
        (("run/policy.zip",), "trained in an environment of --env in-loop, this one is of --env recipe"),
    ):
        done = run("evaluate", *task, *arguments, cwd=tmp_path)
        assert done.returncode == 2 and expected in " ".join(done.stderr.split())
