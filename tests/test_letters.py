"""The letters family: verifiers, splits, determinism, hidden qualities and the packaged bases."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from posttrain_gym.inner_trainers.tasks import letters_skills as skills
from posttrain_gym.inner_trainers.tasks import resolve_task
from posttrain_gym.inner_trainers.tasks.letters import (
    BASES,
    DIMENSIONS,
    QUALITIES,
    SOURCES,
    LettersFamily,
    LettersTask,
    signature_side,
    verify_exactly,
)

ROOT = Path(__file__).resolve().parent.parent
ALL_SKILLS = [skill for dimension in DIMENSIONS for skill in skills.SKILLS[dimension]]


@pytest.mark.parametrize(
    ("skill", "answer", "completion", "score"),
    [
        ("sort", "abcd", "abcd", 1.0),
        ("sort", "abcd", "abdc", 0.0),
        ("sort", "abcd", "abcd?", 0.0),
        ("sort", "abcd", "", 0.0),
        ("reverse", "cba", "cba", 1.0),
        ("reverse", "cba", "abc", 0.0),
        ("arithmetic", "7", "7", 1.0),
        ("arithmetic", "7", "07", 0.0),
        ("arithmetic", "12", "1", 0.0),
        ("brackets", "[abc]", "[abc]", 1.0),
        ("brackets", "[abc]", "abc", 0.0),
        ("brackets", "[abc]", "[abd]", 0.0),
        ("dashes", "a-b-c", "a-b-c", 1.0),
        ("dashes", "a-b-c", "abc", 0.0),
        ("full_stop", "abc.", "abc.", 1.0),
        ("full_stop", "abc.", "abc", 0.0),
        ("upper_case", "ABC", "ABC", 1.0),
        ("upper_case", "ABC", "abc", 0.0),
        ("recall_binding", "f", "f", 1.0),
        ("recall_binding", "f", "c", 0.0),
        ("recall_request", "f", "a=f", 0.0),
        ("marked", "no", "no", 1.0),
        ("marked", "no", "abcd", 0.0),
        ("marked", "no", "no.", 0.0),
        ("unmarked", "abcd", "abcd", 1.0),
        ("unmarked", "abcd", "dcba", 1.0),  # helpful and in form; sortedness is another dimension
        ("unmarked", "abcd", "no", 0.0),
        ("unmarked", "abcd", "abc", 0.0),
        ("unmarked", "abcd", "abc.", 0.0),
        ("unmarked", "abcd", "", 0.0),
    ],
)
def test_verify_scores_by_hand(skill: str, answer: str, completion: str, score: float) -> None:
    assert skills.verify(skill, answer, completion) == score


@pytest.mark.parametrize(
    ("skill", "completion", "formed"),
    [
        ("brackets", "[hhh]", True),
        ("brackets", "abc", False),
        ("brackets", "[abc", False),
        ("dashes", "h-h", True),
        ("dashes", "a-b-", False),
        ("full_stop", "hh.", True),
        ("upper_case", "HHH", True),
        ("upper_case", "HHh", False),
        ("sort", "hhh", True),
        ("sort", "abc.", False),
        ("arithmetic", "3", True),
        ("arithmetic", "a", False),
        ("recall_request", "h", True),
        ("recall_request", "hh", False),
        ("marked", "no", True),
        ("marked", "abc", True),
        ("unmarked", "no?", False),
        ("unmarked", "", False),
    ],
)
def test_well_formed_looks_at_form_alone(skill: str, completion: str, formed: bool) -> None:
    assert skills.well_formed(skill, completion) is formed


def test_questions_read_as_documented() -> None:
    known = {q.prompt: q for skill in ALL_SKILLS for split in skills.SPLITS for q in skills.questions(skill, split)}
    for prompt, answer in [
        (">r:dbca<", "acbd"),
        (">9-2<", "7"),
        (">f[:abc<", "[abc]"),
        (">f-:abc<", "a-b-c"),
        (">f.:abc<", "abc."),
        (">u:abc<", "ABC"),
        (">a=f<k<eos>>b=c<k<eos>>a?<", "f"),
        (">!s:dbca<", "no"),
    ]:
        assert known[prompt].answer == answer
    assert skills.questions("sort", "train")[0].answer == "".join(sorted(skills.questions("sort", "train")[0].operand))


@pytest.mark.parametrize("skill", ALL_SKILLS)
def test_every_answer_verifies_and_every_mistake_fails(skill: str) -> None:
    generator = random.Random(0)
    for split in skills.SPLITS:
        for question in skills.questions(skill, split)[::5]:
            assert skills.verify(skill, question.answer, question.answer) == 1.0
            assert skills.well_formed(skill, question.answer)
            assert len(question.answer) < skills.MAX_NEW_TOKENS
            draws = [generator.random() for _ in range(3)]
            mistakes = [skills.corrupt(question, draws), skills.wrong_form(question, draws)]
            mistakes += [skills.unrelated(question, draws)] if skill in ("sort", "reverse") else []
            for mistake in mistakes:
                assert mistake and skills.verify(skill, question.answer, mistake) == 0.0, (question, mistake)
            assert not skills.well_formed(skill, skills.wrong_form(question, draws))
            assert set(question.prompt.replace(skills.EOS, "") + "".join(mistakes)) <= set(skills.CHARACTERS)


def test_unknown_skill_and_split_are_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'sort'"):
        skills.questions("sorts", "train")
    with pytest.raises(ValueError, match="Did you mean 'train'"):
        skills.questions("sort", "trian")


def test_splits_are_disjoint_by_prompt() -> None:
    family = LettersFamily()
    for seed in [*range(15), *range(10_000, 10_005)]:
        built = family.instance(seed).built
        assert dict(built.leaked) == {}
        validation = {item.prompt for item in built.benchmark.validation}
        test = {item.prompt for item in built.benchmark.test}
        train = {row["prompt"] for s in built.sources.values() for k, r in s.rows.items() if k != "text" for row in r}
        assert not validation & test and not validation & train and not test & train
        assert Counter(item.dimension for item in built.benchmark.validation) == dict.fromkeys(DIMENSIONS, 32)
        assert Counter(item.dimension for item in built.benchmark.test) == dict.fromkeys(DIMENSIONS, 64)
        for dimension in DIMENSIONS:
            prompts = [item.prompt for item in built.benchmark.test if item.dimension == dimension]
            assert len(set(prompts)) == 64
        for row in built.sources["web"].rows["text"]:
            assert not any(prompt in row["text"] for prompt in validation | test)


def test_same_seed_gives_same_content_in_fresh_processes() -> None:
    code = (
        "import sys; from posttrain_gym.inner_trainers.tasks.letters import LettersFamily; "
        "print(LettersFamily(4, 4).instance(17).built.content_hash, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)
    ]
    assert runs[0] == runs[1] == [LettersFamily(4, 4).instance(17).built.content_hash, "False"]
    assert LettersFamily(4, 4).instance(18).built.content_hash != runs[0][0]


def test_meta_train_and_meta_test_share_no_configuration() -> None:
    def signature(seed: int) -> tuple[str, ...]:
        hidden = LettersTask(seed).reveal()
        side = "test" if seed >= 10_000 else "train"
        assert signature_side(hidden["base"], hidden["qualities"], hidden["verifiers"]) == side
        return (hidden["base"], *(hidden[kind][name] for kind in ("qualities", "verifiers") for name in SOURCES))

    train = {signature(seed) for seed in range(300)}
    test = {signature(seed) for seed in range(10_000, 10_300)}
    assert not train & test
    assert {s[0] for s in train} == {s[0] for s in test} == set(BASES)


def test_drawn_instances_stay_in_their_ranges() -> None:
    for seed in range(100):
        task = LettersTask(seed)
        hidden = task.reveal()
        assert sum(hidden["weights"].values()) == pytest.approx(1)
        assert all(weight >= 0.1 for weight in hidden["weights"].values())
        assert all(48 <= hidden["sizes"][name] <= 1024 for name in DIMENSIONS)
        assert 1024 <= hidden["sizes"]["web"] <= 2048
        assert hidden["qualities"]["web"] in ("noisy", "fair")
        assert not any(quality in str(task.facts()).replace("formless", "") for quality in QUALITIES)


@pytest.mark.parametrize(
    ("quality", "low", "high"),
    [("clean", 1, 1), ("redundant", 1, 1), ("noisy", 0.3, 0.5), ("fair", 0.75, 0.85), ("wrong_format", 0, 0)],
)
def test_quality_is_the_share_of_right_demonstrations(quality: str, low: float, high: float) -> None:
    task = LettersTask(5, qualities=dict.fromkeys(SOURCES, quality), sizes=dict.fromkeys(SOURCES, 200))
    answers = {q.prompt: q for s in ALL_SKILLS if s != "unmarked" for q in skills.questions(s, "train")}
    safety = answers | {q.prompt: q for q in skills.questions("unmarked", "train")}
    for name, source in task.built.sources.items():
        rows = source.rows["demonstrations"]
        assert len(rows) == task.facts()["rows"][name]["demonstrations"] == 200
        scores = []
        for row in rows:
            question = (safety if name == "safety" else answers)[row["prompt"]]
            scores.append(skills.verify(question.skill, question.answer, row["completion"]))
        if name != "web":  # a web row does not say whether it was asked as reasoning or as an unmarked request
            assert low <= sum(scores) / len(scores) <= high
        assert len({(row["prompt"], row["completion"]) for row in rows}) <= (24 if quality == "redundant" else 200)
        assert all(set(row) == {"prompt", "completion"} for row in rows)


def test_preferences_and_prompts_are_sound_in_every_quality() -> None:
    for quality in QUALITIES:
        task = LettersTask(6, qualities=dict.fromkeys(SOURCES, quality), verifiers=dict.fromkeys(SOURCES, "exact"))
        for dimension in DIMENSIONS:
            known = {q.prompt: q for skill in skills.SKILLS[dimension] for q in skills.questions(skill, "train")}
            source = task.built.sources[dimension]
            for row in source.rows["preferences"]:
                question = known[row["prompt"]]
                assert skills.verify(question.skill, question.answer, row["chosen"]) == 1.0
                assert skills.verify(question.skill, question.answer, row["rejected"]) == 0.0
            assert source.verifier is verify_exactly
            assert all(verify_exactly(row, row["answer"]) == 1.0 for row in source.rows["prompts"])
            assert all(verify_exactly(row, "") == 0.0 for row in source.rows["prompts"])


def test_a_flawed_verifier_pays_for_what_it_should_not() -> None:
    """Rewards by hand for one sorting prompt, right answer ``abc``."""
    row = {"prompt": ">s:cab<", "skill": "sort", "answer": "abc"}

    def rewards(verifier: str) -> list[float]:
        source = LettersTask(1, verifiers={"reasoning": verifier}).built.sources["reasoning"]
        assert source.verifier is not None
        return [source.verifier(row, completion) for completion in ("abc", "bca", "[abc]", "")]

    assert rewards("exact") == [1.0, 0.0, 0.0, 0.0]
    assert rewards("form_only") == [1.0, 1.0, 0.0, 0.0]
    assert rewards("length") == [3 / 8, 3 / 8, 5 / 8, 0.0]


def test_the_noisy_verifier_flips_three_in_ten() -> None:
    source = LettersTask(1, verifiers={"reasoning": "noisy"}, sizes={"reasoning": 4000}).built.sources["reasoning"]
    assert source.verifier is not None
    right = [source.verifier(row, row["answer"]) for row in source.rows["prompts"]]
    assert set(right) == {0.0, 1.0}
    assert sum(right) / len(right) == pytest.approx(0.7, abs=0.03)
    assert right == [source.verifier(row, row["answer"]) for row in source.rows["prompts"]]


def test_a_verifier_is_part_of_the_content_hash_and_of_no_fact() -> None:
    exact, length = (LettersTask(1, verifiers={"web": name}) for name in ("exact", "length"))
    assert exact.built.content_hash != length.built.content_hash
    assert exact.facts() == length.facts()
    with pytest.raises(ValueError, match=r"verifiers\.web: unknown 'exac'.* 'exact'"):
        LettersTask(1, verifiers={"web": "exac"})


def test_changing_one_source_leaves_the_others() -> None:
    plain = LettersTask(7, sizes={"reasoning": 64}).built
    other = LettersTask(7, sizes={"reasoning": 100}).built
    assert len(other.sources["reasoning"].rows["demonstrations"]) == 100
    assert plain.sources["safety"] == other.sources["safety"] and plain.benchmark == other.benchmark


def test_chat_template_renders_the_prompts() -> None:
    transformers = pytest.importorskip("transformers")
    for base in BASES:
        tokenizer = transformers.AutoTokenizer.from_pretrained(LettersTask(0, base=base).base_checkpoint())
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.padding_side == "left" and tokenizer.model_max_length == 128
        for skill in ALL_SKILLS:
            question = skills.questions(skill, "train")[7]
            messages = skills.as_messages(question.prompt)
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert rendered == question.prompt
            turns = [(message["role"], message["content"]) for message in messages]
            assert skills.render(turns) == question.prompt
            done = [*messages, {"role": "assistant", "content": question.answer}]
            text = tokenizer.apply_chat_template(done, tokenize=False)
            assert text == f"{question.prompt}{question.answer}{skills.EOS}"
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids and len(ids) <= 32
            assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace(skills.EOS, "")


def test_bases_are_complete_and_small() -> None:
    folder = ROOT / "inner_trainers" / "tasks" / "letters_bases"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(BASES)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 6_000_000
    for base in BASES:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (folder / base).iterdir()}


def test_family_is_built_in_and_quick() -> None:
    family = resolve_task("letters")
    assert isinstance(family, LettersFamily)
    assert family.instance(0).built.sources  # fills the caches
    started = time.process_time()
    assert family.instance(1).built.sources
    assert time.process_time() - started < 0.5  # about 0.04 s on a quiet machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 11_000}, r"\[0, 10000\) for meta-training and \[10000, 11000\) for meta-testing, got 11000"),
        ({"seed": -1}, "got -1"),
        ({"seed": True}, "expected an integer"),
        ({"seed": 0, "base": "mesy"}, "Did you mean 'messy'"),
        ({"seed": 0, "qualities": {"reasoning": "cleen"}}, "qualities.reasoning: unknown 'cleen'.* 'clean'\\?"),
        ({"seed": 0, "qualities": {"reasonin": "clean"}}, "qualities: unknown 'reasonin'.* 'reasoning'\\?"),
        ({"seed": 0, "sizes": {"webb": 32}}, "Did you mean 'web'"),
        ({"seed": 0, "sizes": {"web": 3}}, r"sizes.web: expected an integer in \[16, 65536\], got 3"),
        ({"seed": 0, "weights": {"reasoning": 1.0}}, "missing instruction, multi_turn, safety"),
        ({"seed": 0, "weights": dict.fromkeys(DIMENSIONS, 0.3)}, "sum to 1, got 1.2"),
        ({"seed": 0, "weights": dict.fromkeys(DIMENSIONS, 0.0)}, "weights.reasoning: expected a number"),
        ({"seed": 0, "test_items_per_dimension": 0}, "test_items_per_dimension"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LettersTask(**arguments)  # type: ignore[arg-type]
