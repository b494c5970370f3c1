"""Reads a benchmark from the keys of a file: dimensions with their items and verifiers, split so that nothing leaks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ..data.errors import DataError
from ..data.formats import prompt_text, renamed
from ..data.reading import open_data
from ..data.shingles import normalise
from ..data.sources import place_of
from ..tasks.base import SPLITS, Benchmark, Item
from ..yaml_file import FileError, YamlFile, read_yaml
from ..yaml_scalars import shown
from ..yaml_section import YamlSection
from .sampling import smallest_hashes, stratified
from .verifiers import ConversationVerifier, Verifier, make_verifier

DEFAULT_MAX_NEW_TOKENS = 64
DEFAULT_VALIDATION_SHARE = 0.5

_TOP = ("max_new_tokens", "validation_share", "content_hash", "dimensions")
_OWN = ("file", "validation", "test", "columns", "verifier", "size", "sample_seed", "stratify_by")
_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "file": ("weight", *_OWN),
        "validation": ("weight", *_OWN),
        "reasoning_gym": ("weight", "reasoning_gym", "settings", "size", "seed", "extract"),
        "lm_eval": ("weight", "lm_eval", "size", "sample_seed", "filter"),
    }
)
_MOST = 1_000_000

Read = TypeVar("Read")


@dataclass(frozen=True)
class Dimension:
    """The items of one dimension, and what judges them.

    Attributes:
        items: split -> items, in their fixed order.
        verifier: judges completions.
    """

    items: Mapping[str, Sequence[Item]]
    verifier: Verifier


@dataclass(frozen=True)
class DimensionScorer:
    """Judges each item by the verifier of its dimension; the verifier's row is the item's data with its prompt.

    Attributes:
        verifiers: dimension -> verifier.
    """

    verifiers: Mapping[str, Verifier]

    def score(self, item: Item, completion: str) -> float:
        """Return how right a completion is, in [0, 1]."""
        return self.verifiers[item.dimension].score(row_of(item), completion)

    def well_formed(self, item: Item, completion: str) -> bool:
        """Return whether a completion has the asked form."""
        return self.verifiers[item.dimension].well_formed(row_of(item), completion)

    def score_turns(self, item: Item, turns: Sequence[str]) -> float:
        """Return how right the assistant's turns are; of a verifier that judges one text, the last turn counts."""
        verifier = self.verifiers[item.dimension]
        if isinstance(verifier, ConversationVerifier):
            return verifier.score_turns(row_of(item), turns)
        return verifier.score(row_of(item), turns[-1])

    @property
    def version(self) -> str:
        """The verifiers' versions, by dimension."""
        return "; ".join(f"{name}: {self.verifiers[name].version}" for name in sorted(self.verifiers))


def row_of(item: Item) -> dict[str, Any]:
    """Return an item as the row that a verifier reads."""
    return {**item.data, "prompt": item.prompt}


def load_benchmark(path: str | Path) -> Benchmark:
    """Read a benchmark from a YAML or JSON file of its own; see `read_benchmark`."""
    path = Path(path)
    file = read_yaml(path, f"benchmark {path}", expected="keys like dimensions")
    return read_benchmark(YamlSection(file), path.resolve().parent)


def read_benchmark(section: YamlSection | YamlFile, folder: Path) -> Benchmark:
    """Read a benchmark.

    Args:
        section: its keys: ``dimensions``, and ``max_new_tokens``, ``validation_share`` and ``content_hash`` if need be.
        folder: what paths are relative to.

    Returns:
        The benchmark. Its items stand in an order that follows from their text alone, dimension by dimension.

    Raises:
        FileError: a key or value is not what it should be, a data file cannot be used, a prompt stands in both splits,
            or the items are others than those whose hash is pinned; says file, line, column and key.
    """
    if isinstance(section, YamlFile):
        section = YamlSection(section)
    section.only(_TOP)
    share = section.number("validation_share", DEFAULT_VALIDATION_SHARE, low=0.05, high=0.95)
    named = section.section("dimensions")
    if not named.data:
        raise section.error("dimensions", "there is no dimension; name at least one.")
    weights = _weights(named)
    dimensions = {name: _dimension(name, named.section(name), folder, share) for name in sorted(named)}
    for split in SPLITS:
        for name, dimension in dimensions.items():
            if not dimension.items[split]:
                other = {s: len(dimension.items[s]) for s in SPLITS}
                raise named.error(
                    name, f"no item falls into the {split} split ({other}); add items, or move the share."
                )
    scorer = DimensionScorer({name: dimension.verifier for name, dimension in dimensions.items()})
    items = {split: [item for each in dimensions.values() for item in each.items[split]] for split in SPLITS}
    _refuse_shared(named, items)
    several = any(item.follow_ups for item in (*items["validation"], *items["test"]))
    try:
        benchmark = Benchmark(
            weights=weights,
            validation=items["validation"],
            test=items["test"],
            score=scorer.score,
            well_formed=scorer.well_formed,
            max_new_tokens=section.integer("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, low=1, high=1_048_576),
            scorer_version=scorer.version,
            score_turns=scorer.score_turns if several else None,
        )
    except FileError:
        raise
    except ValueError as error:
        raise section.error("dimensions", str(error).removeprefix("benchmark: ")) from None
    _check_pin(section, benchmark)
    return benchmark


def _weights(named: YamlSection) -> dict[str, float]:
    sections = {name: named.section(name) for name in named}
    given = [name for name, section in sections.items() if "weight" in section]
    if not given:
        return dict.fromkeys(sections, 1 / len(sections))
    weights = {}
    for name, section in sections.items():
        if name not in given:
            raise named.error(
                name, f"key 'weight' is missing, which {', '.join(given)} have; give all of them one, or none."
            )
        weights[name] = section.number("weight", low=0, high=1, low_open=True)
    total = sum(weights.values())
    if abs(total - 1) > 1e-6:
        raise named.error(None, f"the weights of the dimensions must sum to 1, they sum to {total:g}.")
    return weights


def _refuse_shared(named: YamlSection, items: Mapping[str, Sequence[Item]]) -> None:
    """Refuse a prompt that one dimension has in validation and another in test, in whatever form."""
    forms = {normalise(item.prompt) or item.prompt: item for item in items["validation"]}
    for item in items["test"]:
        other = forms.get(normalise(item.prompt) or item.prompt)
        if other is not None:
            raise named.error(
                item.dimension,
                f"a prompt stands in both splits, case and white space aside: {shown(item.prompt)} is in test here, "
                f"and {shown(other.prompt)} in validation of {other.dimension!r}; take one out.",
            )


def _check_pin(section: YamlSection, benchmark: Benchmark) -> None:
    if "content_hash" not in section:
        return
    pinned = str(section.value("content_hash"))
    if pinned == benchmark.content_hash:
        return
    counts = {
        name: tuple(sum(item.dimension == name for item in benchmark.items(split)) for split in SPLITS)
        for name in benchmark.dimensions
    }
    listed = ", ".join(f"{name} {first} + {second}" for name, (first, second) in counts.items())
    raise section.error(
        "content_hash",
        f"the benchmark has moved: {pinned} is pinned, and what the files hold now is {benchmark.content_hash} (items "
        f"of validation + test: {listed}). Scores of the two are not comparable. Items, weights, max_new_tokens, "
        "verifiers and their settings count; restore what was changed, or pin the new hash if the change is meant.",
    )


# Dimensions -----------------------------------------------------------------------------------------------------------


def _dimension(name: str, section: YamlSection, folder: Path, share: float) -> Dimension:
    kinds = [kind for kind in _KINDS if kind in section]
    if len(kinds) != 1:
        raise section.error(
            None, "expected one of the keys file, reasoning_gym and lm_eval, or validation and test with a file each."
        )
    section.only(_KINDS[kinds[0]])
    if kinds[0] == "reasoning_gym":
        return _of_reasoning_gym(name, section)
    if kinds[0] == "lm_eval":
        return _of_lm_eval(name, section, folder, share)
    return _of_files(name, section, folder, share)


def _of_files(name: str, section: YamlSection, folder: Path, share: float) -> Dimension:
    verifier = read_verifier(section, "verifier")
    if "file" in section:
        if "test" in section:
            raise section.error("test", "one file is split by itself; give validation and test, or file.", key=True)
        items = _asked(section, "file", lambda: _items(name, section, "file", folder, verifier))
        by_split: dict[str, list[tuple[Item, str]]] = {split: [] for split in SPLITS}
        for item, place in items:
            by_split[split_of(item.prompt, share)].append((item, place))
    else:
        section.value("test")
        by_split = {
            split: _asked(section, split, lambda split=split: _items(name, section, split, folder, verifier))  # type: ignore[misc]
            for split in SPLITS
        }
        places = {normalise(item.prompt): place for item, place in by_split["validation"]}
        for item, place in by_split["test"]:
            if normalise(item.prompt) in places:
                raise section.error(
                    "test",
                    f"a prompt stands in both splits, case and white space aside: {shown(item.prompt)} ("
                    f"{places[normalise(item.prompt)]}, and {place}); take one out.",
                )
    return Dimension(
        {split: _sampled(section, [item for item, _ in found]) for split, found in by_split.items()}, verifier
    )


def _sampled(section: YamlSection, items: Sequence[Item]) -> list[Item]:
    """Return the items that are asked for, in the order of their hashes."""
    seed = section.integer("sample_seed", 0, low=0, high=2**63 - 1)
    size = section.integer("size", low=1, high=_MOST) if "size" in section else None
    if "stratify_by" not in section:
        return smallest_hashes(items, size, seed)
    column = section.text("stratify_by")
    if size is None:
        raise section.error("stratify_by", "without a size, all items are taken; give one, or leave it out.", key=True)
    for item in items:
        if column not in item.data:
            raise section.error("stratify_by", f"item {shown(item.prompt)} has no column {column!r}.")
    return stratified(items, size, seed, lambda item: str(item.data[column]))


def _items(name: str, section: YamlSection, key: str, folder: Path, verifier: Verifier) -> list[tuple[Item, str]]:
    """Return the items of a data file with their places; one that stands twice comes once."""
    where = section.text(key)
    beside = folder / Path(where).expanduser()
    data = open_data(beside if beside.exists() or Path(where).suffix or "*" in where else where)
    columns = section.section("columns").data if "columns" in section else None
    found: dict[str, tuple[Item, str]] = {}
    for raw in data.rows():
        place = place_of(data, raw)
        try:
            row = renamed(raw.value, columns, place)
            if "prompt" not in row:
                raise ValueError(
                    f"{place}: there is no column 'prompt'; the columns are {', '.join(row)}. If it is called "
                    "otherwise, say so: columns {prompt: …}."
                )
            prompt = prompt_text(row.pop("prompt"), place)
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f"{place}: the prompt must be text, got {shown(prompt)}.")
            follow_ups = _follow_ups(row.pop("follow_ups", None), place)
            item = Item(prompt, name, {key: value for key, value in row.items() if value is not None}, follow_ups)
            try:
                verifier.check_row(row_of(item))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        except DataError:
            raise
        except ValueError as error:
            raise DataError(
                raw.path or data.path, str(error).removeprefix(place).lstrip(":, "), line=raw.line, row=raw.number
            ) from None
        form = normalise(prompt) or prompt
        if form not in found:
            found[form] = (item, place)
        elif found[form][0].data != item.data or found[form][0].follow_ups != item.follow_ups:
            raise DataError(
                raw.path or data.path,
                f"the prompt {shown(prompt)} stands at {found[form][1]} too, with other columns; keep the right one.",
                line=raw.line,
                row=raw.number,
            )
    return list(found.values())


def _follow_ups(value: Any, place: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each.strip() for each in value):
        raise ValueError(f"{place}: follow_ups must be a list with what the user says next, got {shown(value)}.")
    return tuple(value)


def _of_reasoning_gym(name: str, section: YamlSection) -> Dimension:
    from .reasoning_gym import ReasoningGym, draw_questions

    settings = section.section("settings").data if "settings" in section else {}
    size = section.integer("size", 100, low=1, high=_MOST)
    seed = section.integer("seed", 0, low=0, high=2**63 - 1)
    dataset = section.text("reasoning_gym")
    extract = section.text("extract", "last_number")
    verifier = _asked(
        section, "reasoning_gym", lambda: ReasoningGym(dataset, tuple(sorted(settings.items())), extract=extract)
    )
    items = {}
    for split in SPLITS:
        drawn = _asked(
            section,
            "reasoning_gym",
            lambda split=split: draw_questions(dataset, settings, split, size, seed),  # type: ignore[misc]
        )
        items[split] = [Item(each.prompt, name, {"answer": each.answer, "metadata": each.metadata}) for each in drawn]
    return Dimension({split: smallest_hashes(found, None, 0) for split, found in items.items()}, verifier)


def _of_lm_eval(name: str, section: YamlSection, folder: Path, share: float) -> Dimension:
    from .lm_eval import read_lm_eval

    path = folder / Path(section.text("lm_eval")).expanduser()
    filter_name = section.text("filter") if "filter" in section else ""
    task = _asked(section, "lm_eval", lambda: read_lm_eval(path, name, filter_name=filter_name))
    by_split: dict[str, list[Item]] = {split: [] for split in SPLITS}
    for item in task.items:
        by_split[split_of(item.prompt, share)].append(item)
    return Dimension({split: _sampled(section, found) for split, found in by_split.items()}, task.verifier)


def read_verifier(section: YamlSection, key: str) -> Verifier:
    """Return the verifier under a key: a name, or keys with its name and settings.

    Raises:
        FileError: the key is missing, or what it says is not known.
    """
    if key not in section:
        raise section.error(None, f"key {key!r} is missing: what judges a completion, for example {{name: exact}}.")
    if isinstance(section.value(key), str):
        return _asked(section, key, lambda: make_verifier(section.text(key)))
    inner = section.section(key)
    settings = {name: value for name, value in inner.data.items() if name != "name"}
    return _asked(section, key, lambda: make_verifier(inner.text("name"), **settings))


def split_of(prompt: str, validation_share: float) -> str:
    """Return the split that a prompt falls into: its normalised text decides, so that no copy lands in the other."""
    digest = hashlib.sha256(normalise(prompt).encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8]) < validation_share * 2**64 else "test"


def _asked(section: YamlSection, key: str, read: Callable[[], Read]) -> Read:
    """Return what is read; an error says where in the file it was asked for."""
    try:
        return read()
    except FileError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise section.error(key, str(error)) from error
