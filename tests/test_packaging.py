"""Folders, links, package lists and the import rule agree; nothing of a machine is written into the project."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("envs", "experiments", "inner_trainers", "meta_policies", "wrappers")
HEAVY = ("torch", "transformers", "trl", "stable_baselines3")


def tracked_files() -> list[str]:
    """Paths of git's tracked files, relative to the root; a link is one entry."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


def package_of(folder: Path) -> str:
    """The import name of a folder below one of the five."""
    return ".".join(("posttrain_gym", *folder.relative_to(ROOT).parts))


def run_python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200"},  # import-linter wraps its lines
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Folders, links and lists


def test_each_folder_has_its_link() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "posttrain_gym").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in FOLDERS}


def test_package_dir_maps_the_five_folders() -> None:
    assert SETUPTOOLS["package-dir"] == {f"posttrain_gym.{name}": name for name in FOLDERS}


def test_every_folder_with_python_files_is_listed() -> None:
    found = {package_of(file.parent) for name in FOLDERS for file in (ROOT / name).rglob("*.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(found | {"posttrain_gym"})
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_listed_package_is_a_package(package: str) -> None:
    parts = package.split(".")[1:]
    folder = ROOT.joinpath(*parts) if parts else ROOT / "posttrain_gym"
    assert (folder / "__init__.py").is_file()


def test_no_python_file_at_the_root() -> None:
    assert list(ROOT.glob("*.py")) == []


def test_tests_are_a_package() -> None:
    assert (ROOT / "tests" / "__init__.py").is_file()


def test_every_data_file_is_listed() -> None:
    listed = SETUPTOOLS["package-data"]
    folders = {ROOT.joinpath(*p.split(".")[1:]) if "." in p else ROOT / p: p for p in SETUPTOOLS["packages"]}
    forgotten = []
    for name in tracked_files():
        path = ROOT / name
        if name.split("/")[0] not in (*FOLDERS, "posttrain_gym") or path.suffix == ".py" or path.is_symlink():
            continue
        owner = next(parent for parent in path.parents if parent in folders)
        inner = path.relative_to(owner)
        patterns = listed.get(folders[owner], [])
        if not any(
            len(inner.parts) == pattern.count("/") + 1 and fnmatch.fnmatchcase(inner.as_posix(), pattern)
            for pattern in patterns
        ):
            forgotten.append(name)
    assert forgotten == []


def test_a_type_checker_finds_the_marker() -> None:
    assert (ROOT / "posttrain_gym" / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"]["posttrain_gym"]


def test_every_dependency_is_pinned_in_the_tested_set() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)] == []
    pinned = {plain(pin.split("==")[0]) for pin in pins}
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {plain(re.split(r"[<>=!~;\[ ]", entry)[0]) for entry in asked} - pinned == set()


# Imports


@pytest.mark.parametrize(
    "module",
    [
        "posttrain_gym",
        "posttrain_gym.envs",
        "posttrain_gym.inner_trainers.recipe",
        "posttrain_gym.inner_trainers.tasks",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = (
        "import importlib, json, sys; importlib.import_module(sys.argv[1]);"
        "print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))"
    )
    done = run_python(code, module, *HEAVY)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium, posttrain_gym\nname = ''",
        "import posttrain_gym, gymnasium\nname = ''",
        "import gymnasium\nname = 'posttrain_gym:'",  # gym.make imports what stands before the colon
    ],
)
def test_the_id_is_registered_in_either_import_order_and_by_module(code: str) -> None:
    task = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
    done = run_python(f"{code}\nprint(gymnasium.make(name + 'PostTrain/Recipe-v0', task={task!r}).spec.id)")
    assert (done.returncode, done.stdout) == (0, "PostTrain/Recipe-v0\n"), done.stderr


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the project's contracts on the ``posttrain_gym`` found from ``folder``."""
    code = (
        "import sys; sys.path.insert(0, '');"
        "from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"
    )
    return run_python(code, str(ROOT / "pyproject.toml"), cwd=folder)


def test_the_import_rule_holds() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PYPROJECT['tool']['importlinter']['contracts'])} kept, 0 broken" in done.stdout


def test_the_import_rule_sees_every_module() -> None:
    graph = grimp.build_graph("posttrain_gym", cache_dir=None)
    files = [file for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    expected = {
        package_of(file.parent) if file.stem == "__init__" else f"{package_of(file.parent)}.{file.stem}"
        for file in files
    }
    assert graph.modules == expected | {"posttrain_gym", "posttrain_gym.__main__"}


@pytest.mark.parametrize(
    ("file", "statement", "contract"),
    [
        ("inner_trainers/recipe.py", "from .. import envs", "Imports only ever point down the layers"),
        ("envs/reward.py", "from ..wrappers import masks", "Imports only ever point down the layers"),
        ("envs/reward.py", "def late():\n    import stable_baselines3", "envs/ works without Stable-Baselines3"),
        ("inner_trainers/recipe.py", "import gymnasium", "inner_trainers/ works without Gymnasium"),
    ],
)
def test_the_import_rule_catches_a_violation(tmp_path: Path, file: str, statement: str, contract: str) -> None:
    package = tmp_path / "posttrain_gym"
    for name in ("", *FOLDERS):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text("")
    (package / "__main__.py").write_text("")
    (package / "wrappers" / "masks.py").write_text("")
    assert lint_imports(tmp_path).returncode == 0

    (package / file).write_text(f"{statement}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
    assert "1 broken" in done.stdout


# Nothing of a machine


MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:home|root|Users|work)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(?:py"
    r"pi\.org|(?:files\.)?python"
    r"hosted\.org|download\.py"
    r"torch\.org|registry\.npm"
    r"js\.org|(?:deb|security)\.deb"
    r"ian\.org)\b"
)


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (MACHINE_PATH, "see /ho" + "me/someone/run", True),
        (MACHINE_PATH, "'/ro" + "ot/.cache'", True),
        (MACHINE_PATH, "docs/home/page and runs/work/a", False),
        (REGISTRY_HOST, "https://py" + "pi.org/simple", True),
        (REGISTRY_HOST, "https://docs.example.org", False),
    ],
)
def test_the_patterns_tell_machines_apart(pattern: re.Pattern[str], text: str, found: bool) -> None:
    assert bool(pattern.search(text)) is found


def test_no_tracked_file_names_a_machine() -> None:
    named = []
    for name in tracked_files():
        path = ROOT / name
        if path.is_symlink() or b"\0" in (data := path.read_bytes())[:8000]:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                named.append(f"{name}:{number}: {line.strip()[:120]}")
    assert named == []


# The command


def test_the_console_script_is_the_module_command() -> None:
    assert PYPROJECT["project"]["scripts"] == {
        "posttrain-agent": "posttrain_gym.experiments.agent_cli:main",
        "posttrain-gym": "posttrain_gym.experiments.cli:main",
    }
    assert "from posttrain_gym.experiments.cli import main" in (ROOT / "posttrain_gym" / "__main__.py").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")}
    assert listed >= {"demo", "test", "lint", "clean", "help"}


def test_paths_named_by_the_contributors_guide_exist() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
