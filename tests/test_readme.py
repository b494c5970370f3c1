"""Every block of the README and the docs is run, at toy size where the block says it takes hundreds of rounds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


COMMANDS = {
    "posttrain-agent": [sys.executable, "-c", "from posttrain_gym.experiments.agent_cli import main; main()"],
    "posttrain-gym": [sys.executable, "-m", "posttrain_gym"],
}


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, match in enumerate(re.finditer(rf"```{language}\n(.*?)```", page.read_text(), re.S), 1):
            found.append((f"{page.name}-{number}", match.group(1)))
    return found


def commands() -> list[str]:
    lines = []
    for _, text in blocks("bash"):
        lines += [line.split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return lines


@pytest.mark.parametrize(("name", "code"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_python_block_runs(name: str, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


def test_readme_blocks_print_what_they_promise() -> None:
    first, *_, last = [code for name, code in blocks("python") if name.startswith("README")]
    shown = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=300).stdout
    assert re.search(r"round 1: grpo from best, lr 0.0004, 20 steps, .* -> 0\.\d{3} ± 0\.\d{3}", shown)
    assert re.search(r"reward [+-]0\.\d{3}, charged \d+ train tokens, budget left \d+%", shown)
    shown = subprocess.run([sys.executable, "-c", last], capture_output=True, text=True, timeout=300).stdout
    assert re.fullmatch(r"test score 0\.\d{3} -> 0\.\d{3} ± 0\.\d{3}\n", shown)


def test_make_targets_exist() -> None:
    targets = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_command_blocks_run_at_toy_size(tmp_path: Path) -> None:
    """Runs the documented commands in order, with fewer rounds, instances and seeds."""
    smaller = {"--rounds": "4", "--seeds": "0", "--instances": "10000", "--workers": "1"}
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    ran = set()
    seen: set[str] = set()
    for line in commands():
        if not line.startswith(("posttrain-gym ", "posttrain-agent ")):
            assert line.startswith(("make ", ".venv/bin/", "python -m ", "tensorboard ")), f"untested command: {line}"
            continue
        words = shlex.split(line)
        for option, value in smaller.items():
            if option in words:
                words[words.index(option) + 1] = value
        if words[1] in ("train", "compare", "evaluate"):
            words += ["--max-rounds", "1", "--budget", "40000"]
        if words[1] == "compare" and "--instances" not in words:
            words += ["--instances", "10000"]
        if "--resume" in words:
            words[words.index("--rounds") + 1] = "32"
        key = " ".join(words)
        if key in seen:
            continue
        seen.add(key)
        done = subprocess.run(
            [*COMMANDS[words[0]], *words[1:]],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=600,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        ran.add(words[1])
    assert {"train", "compare", "run-recipe"} <= ran
    assert (tmp_path / "runs" / "compared" / "report.html").is_file()


def test_the_example_task_is_at_most_forty_lines() -> None:
    assert len((ROOT / "experiments" / "examples" / "doubling.py").read_text().splitlines()) <= 40
