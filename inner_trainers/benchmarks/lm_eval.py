"""Reads tasks of the lm-evaluation-harness from local YAML and data files, as items that are answered by generation.

Templates are rendered in Jinja's sandbox; nothing of a task is executed. What its files cannot say without code
(``!function``) is refused with the reason.
"""

from __future__ import annotations

import ast
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import regex

from ..data.reading import open_data
from ..messages import did_you_mean, first_line
from ..tasks.base import Item
from ..yaml_file import FileError, read_yaml
from ..yaml_scalars import shown
from ..yaml_section import YamlSection
from .verifiers.base import Versioned, require_columns
from .verifiers.extraction import LONGEST, REGEX_SECONDS, compiled

OUTPUT_TYPES = ("generate_until", "multiple_choice")
INVALID = "[invalid]"
"""What a filter makes of a completion that it finds nothing in."""

_LOADERS = ("json", "csv", "parquet", "arrow")
_CODE = (
    "process_docs",
    "process_results",
    "custom_dataset",
    "unsafe_code",
    "use_prompt",
    "doc_to_image",
    "doc_to_audio",
)
_IGNORED = (
    "task",
    "task_alias",
    "tag",
    "group",
    "group_alias",
    "dataset_name",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "should_decontaminate",
    "doc_to_decontamination_query",
    "metadata",
    "repeats",
)
_READ = (
    "dataset_path",
    "dataset_kwargs",
    "gen_prefix",
    "include",
    "output_type",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "fewshot_config",
    "num_fewshot",
    "metric_list",
    "filter_list",
    "generation_kwargs",
)
_CHOICE_METRICS = ("acc", "acc_norm", "acc_mutual_info", "exact_match")


@dataclass(frozen=True)
class LmEvalTask:
    """What a task's files say.

    Attributes:
        items: one item for each document of the split that is scored.
        verifier: judges completions.
        notes: where it is other than in the harness.
    """

    items: Sequence[Item]
    verifier: LmEvalVerifier
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LmEvalVerifier(Versioned):
    """Judges by exact match as the harness does: stop texts, the filter, then both sides without what is ignored.

    Attributes:
        until: texts that end a completion.
        filters: steps as (function, settings as sorted pairs), of the filter that was chosen.
        ignore_case: whether case counts for nothing.
        ignore_punctuation: whether ASCII punctuation counts for nothing.
        ignore_numbers: whether digits count for nothing.
        regexes_to_ignore: patterns that are taken out of both sides.
        choice: whether the answer is one of several choices: the first line is compared, case and outer punctuation
            aside.
    """

    until: tuple[str, ...] = ()
    filters: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: tuple[str, ...] = ()
    choice: bool = False

    def __post_init__(self) -> None:
        """Check the patterns.

        Raises:
            ValueError: one is no pattern, or a filter is unknown.
        """
        for pattern in self.regexes_to_ignore:
            compiled(pattern, "regexes_to_ignore")
        for function, settings in self.filters:
            if function not in _FILTERS:
                raise ValueError(
                    f"filter_list: no filter is called {function!r} here.{did_you_mean(function, _FILTERS)}"
                )
            if function == "regex":
                compiled(str(dict(settings).get("regex_pattern", r"#### (\-?[0-9\.\,]+)")), "regex_pattern")

    @property
    def columns(self) -> tuple[str, ...]:
        """The right answers."""
        return ("answers",)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without answers; see `Verifier.check_row`."""
        require_columns(row, self.columns)

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return 1.0 when the completion matches one of the answers, else 0.0."""
        found = self._form(self._answer(completion))
        return float(any(found == self._form(str(answer)) for answer in row["answers"]))

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the filter finds an answer; of choices, whether it is one of them."""
        found = self._answer(completion)
        if self.choice and row.get("choices"):
            return self._form(found) in {self._form(str(choice)) for choice in row["choices"]}
        return bool(found.strip()) and found != INVALID

    def _answer(self, completion: str) -> str:
        text = completion[:LONGEST]
        for stop in self.until:
            text = text.split(stop, 1)[0] if stop else text
        for function, settings in self.filters:
            text = _FILTERS[function](text, dict(settings))
        if self.choice:
            text = text.strip().splitlines()[0] if text.strip() else ""
        return text

    def _form(self, text: str) -> str:
        for pattern in self.regexes_to_ignore:
            try:
                text = regex.sub(pattern, "", text, timeout=REGEX_SECONDS)
            except TimeoutError:
                return INVALID
        if self.ignore_case or self.choice:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        if self.ignore_numbers:
            text = text.translate(str.maketrans("", "", string.digits))
        return text.strip().strip(".()\"' ") if self.choice else text


def read_lm_eval(path: str | Path, dimension: str, *, filter_name: str = "") -> LmEvalTask:
    """Read a task.

    Args:
        path: its YAML file; ``include`` and data files are relative to it.
        dimension: the dimension that its items belong to.
        filter_name: the filter of its ``filter_list`` that is used; empty for the first.

    Raises:
        FileError: something in it cannot be read, or needs code or the hub; says where and what to do.
    """
    section = _loaded(Path(path))
    _refuse_code(section)
    output = section.text("output_type", "generate_until")
    if output not in OUTPUT_TYPES:
        raise section.error(
            "output_type",
            f"{output!r} scores by log-likelihood, and completions are generated here; types that can be read: "
            f"{', '.join(OUTPUT_TYPES)}.",
        )
    choice = output == "multiple_choice"
    folder = Path(path).parent
    documents = _documents(section, ("test_split", "validation_split", "training_split"), folder)
    shots = section.integer("num_fewshot", 0, low=0, high=100)
    head = section.text("description", "") if section.data.get("description") else ""
    if section.data.get("gen_prefix"):
        raise section.error(
            "gen_prefix",
            "a text that the answer begins with is not read here; write it at the end of doc_to_text, and before the "
            "answers of examples.",
            key=True,
        )
    if shots:
        head += _shots(section, shots, choice, documents, folder)
    items = []
    seen: set[str] = set()
    for number, document in enumerate(documents, start=1):
        where = f"document {number}"
        prompt = head + _rendered(section, "doc_to_text", document, where)
        answers, choices = _answers(section, document, choice, where)
        if prompt not in seen:
            seen.add(prompt)
            items.append(Item(prompt, dimension, {"answers": answers, **({"choices": choices} if choices else {})}))
    notes = ["few-shot examples are the first of their split, where the harness may draw them"] if shots else []
    if choice:
        notes.append("choices are generated and compared, where the harness compares log-likelihoods: scores differ")
    return LmEvalTask(items, _verifier(section, choice, filter_name), tuple(notes))


def _loaded(path: Path, above: tuple[Path, ...] = ()) -> YamlSection:
    """Return a task's keys, with those of the files that it includes below its own."""
    if path.resolve() in above:
        raise ValueError(f"{path}: it includes itself.")
    file = read_yaml(path, f"task {path}", expected="keys like doc_to_text")
    included = file.data.pop("include", None)
    for name in [included] if isinstance(included, str) else included or []:
        base = _loaded(path.parent / str(name), (*above, path.resolve()))
        for key, value in base.data.items():
            file.data.setdefault(key, value)
    return YamlSection(file)


def _refuse_code(section: YamlSection) -> None:
    for name, value in section.data.items():
        if name in _CODE or (isinstance(value, str) and value.startswith("!function")):
            raise section.error(
                name,
                "it is code of the task, and no code of files is run here; write the documents as they come out of it "
                "into a JSONL file, and say the rest as templates.",
                key=True,
            )
        if name not in (*_READ, *_IGNORED):
            raise section.error(name, f"unknown key {shown(name)}.{did_you_mean(name, _READ)}", key=True)


def _documents(section: YamlSection, splits: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return the documents of the first of some splits that the task names."""
    named = [section.text(split) for split in splits if section.data.get(split)]
    loader = section.text("dataset_path")
    files: Any = (section.data.get("dataset_kwargs") or {}).get("data_files")
    if files is None:
        local = folder / loader
        if not local.exists():
            raise section.error(
                "dataset_path",
                f"{loader!r} is no file or folder beside the task, and data sets of the hub are not fetched for a "
                "benchmark: download its files, then write dataset_path: json, and "
                "dataset_kwargs: {data_files: {test: FILE}}.",
            )
        files = {split: str(found) for split in named for found in _of_split(local, split)[:1]} or {"test": str(local)}
    elif loader not in _LOADERS:
        raise section.error("dataset_path", f"with data_files, it is one of {', '.join(_LOADERS)}, got {loader!r}.")
    if isinstance(files, str | list):
        files = {(named or ["train"])[0]: files}
    for split in [*named, *files]:
        if split in files:
            wanted = files[split] if isinstance(files[split], list) else [files[split]]
            paths = [folder / str(each) for each in wanted]
            return [row.value for row in itertools.chain.from_iterable(open_data(each).rows() for each in paths)]
    raise section.error(
        "dataset_kwargs", f"data_files has the splits {', '.join(files)}, the task names {', '.join(named)}."
    )


def _of_split(folder: Path, split: str) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(each for each in folder.iterdir() if each.name.split(".")[0].split("-")[0] == split)


def _shots(section: YamlSection, count: int, choice: bool, documents: list[dict[str, Any]], folder: Path) -> str:
    """Return the worked examples before each prompt."""
    config = section.data.get("fewshot_config") or {}
    for name in config:
        if name not in ("sampler", "samples"):
            raise section.error(
                "fewshot_config",
                f"{name!r} is not read here, and examples would be others than in the harness; write the examples as "
                "they come out of it in samples, or leave it out.",
            )
    given = config.get("samples")
    if isinstance(given, list):
        examples = given
    else:
        if not section.data.get("fewshot_split") and not section.data.get("training_split"):
            raise section.error(
                "num_fewshot",
                "there is no fewshot_split or training_split to take examples from; name one, or write 0.",
            )
        examples = _documents(section, ("fewshot_split", "training_split"), folder)
    if len(examples) < count:
        raise section.error("num_fewshot", f"{count} examples are asked, {len(examples)} are there.")
    between = section.data.get("target_delimiter", " ")
    after = section.data.get("fewshot_delimiter", "\n\n")
    text = ""
    for number, example in enumerate(examples[:count], start=1):
        if example in documents:
            raise section.error("num_fewshot", f"example {number} is a document that is scored; take it out of one.")
        where = f"example {number}"
        answer = _answers(section, example, choice, where)[0][0]
        text += f"{_rendered(section, 'doc_to_text', example, where)}{between}{answer}{after}"
    return text


def _answers(
    section: YamlSection, document: Mapping[str, Any], choice: bool, where: str
) -> tuple[list[str], list[str]]:
    """Return the right answers of a document, and the choices there are."""
    target = _target(section, document, where)
    if not choice:
        return [str(each) for each in target] if isinstance(target, list) else [str(target)], []
    choices = _choices(section, document, where)
    places = target if isinstance(target, list) else [target]
    answers = []
    for place in places:
        if isinstance(place, str) and place.strip().lstrip("-").isdigit():
            place = int(place)
        if isinstance(place, int) and not isinstance(place, bool):
            if not 0 <= place < len(choices):
                raise section.error("doc_to_target", f"{where}: choice {place} of {len(choices)} is asked.")
            answers.append(choices[place])
        elif str(place) in choices:
            answers.append(str(place))
        else:
            raise section.error("doc_to_target", f"{where}: {shown(place)} is none of the choices {choices}.")
    return answers, choices


def _target(section: YamlSection, document: Mapping[str, Any], where: str) -> Any:
    value = section.value("doc_to_target")
    if isinstance(value, int):
        return value
    if isinstance(value, str) and value in document:
        return document[value]
    return _rendered(section, "doc_to_target", document, where)


def _choices(section: YamlSection, document: Mapping[str, Any], where: str) -> list[str]:
    value = section.value("doc_to_choice")
    if isinstance(value, str):
        value = document[value] if value in document else _rendered(section, "doc_to_choice", document, where)
        if isinstance(value, str):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                raise section.error(
                    "doc_to_choice", f"{where}: expected a list of choices, got {shown(value)}."
                ) from None
    if not isinstance(value, list) or len(value) < 2:
        raise section.error("doc_to_choice", f"{where}: expected a list of at least two choices, got {shown(value)}.")
    return [str(each) for each in value]


def _rendered(section: YamlSection, key: str, document: Mapping[str, Any], where: str) -> str:
    """Return a template rendered for a document; a plain column name stands for the column."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    template = section.value(key)
    if not isinstance(template, str):
        raise section.error(key, f"expected a template or a column, got {shown(template)}.")
    if template in document:
        return str(document[template])
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template).render(**document)
    except Exception as error:  # a template raises what it likes
        raise section.error(
            key, f"{where}: the template raised {first_line(error)}; columns: {', '.join(document)}."
        ) from None


def _verifier(section: YamlSection, choice: bool, filter_name: str) -> LmEvalVerifier:
    metrics = section.data.get("metric_list") or [{"metric": "acc" if choice else "exact_match"}]
    names = [each.get("metric") if isinstance(each, Mapping) else each for each in metrics]
    known = _CHOICE_METRICS if choice else ("exact_match",)
    chosen = next((each for each, name in zip(metrics, names, strict=True) if name in known), None)
    if chosen is None:
        raise section.error(
            "metric_list", f"metrics that can be computed here: {', '.join(known)}; the task has {names}."
        )
    generation = section.data.get("generation_kwargs") or {}
    until = generation.get("until", [section.data.get("fewshot_delimiter", "\n\n")] if not choice else [])
    settings = {
        name: chosen[name]
        for name in ("ignore_case", "ignore_punctuation", "ignore_numbers")
        if isinstance(chosen, Mapping) and name in chosen
    }
    try:
        return LmEvalVerifier(
            until=tuple([until] if isinstance(until, str) else until),
            filters=_filters(section, filter_name),
            regexes_to_ignore=tuple(chosen.get("regexes_to_ignore", ())),
            choice=choice,
            **settings,
        )
    except FileError:
        raise
    except (ValueError, TypeError) as error:
        raise section.error("metric_list" if "regexes" in str(error) else "filter_list", str(error)) from None


def _filters(section: YamlSection, name: str) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    listed = section.data.get("filter_list") or []
    if not listed:
        return ()
    names = [str(each.get("name")) for each in listed]
    if name and name not in names:
        raise section.error("filter_list", f"no filter is called {name!r}.{did_you_mean(name, names)}")
    chosen = listed[names.index(name) if name else 0]
    return tuple(
        (str(step["function"]), tuple(sorted((key, value) for key, value in step.items() if key != "function")))
        for step in chosen.get("filter", [])
    )


def _regex_filter(text: str, settings: Mapping[str, Any]) -> str:
    pattern = str(settings.get("regex_pattern", r"#### (\-?[0-9\.\,]+)"))
    fallback = str(settings.get("fallback", INVALID))
    try:
        found = regex.findall(pattern, text, timeout=REGEX_SECONDS)
        match: Any = found[int(settings.get("group_select", 0))] if found else None
    except (TimeoutError, IndexError):
        return fallback
    if isinstance(match, tuple):
        match = next((group for group in match if group), None)
    return fallback if match is None else str(match).strip()


_FILTERS: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = MappingProxyType(
    {
        "regex": _regex_filter,
        "take_first": lambda text, settings: text,
        "remove_whitespace": lambda text, settings: text.lstrip(),
        "lowercase": lambda text, settings: text.lower(),
        "uppercase": lambda text, settings: text.upper(),
    }
)
