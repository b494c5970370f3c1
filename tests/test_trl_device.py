"""What a round's device decides: TF32, vLLM, half precision, and the telemetry of the report."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_gym.envs.post_training import round_info
from posttrain_gym.envs.search import Outcome
from posttrain_gym.experiments.cli_output import print_round
from posttrain_gym.inner_trainers.base import RoundReport
from posttrain_gym.inner_trainers.tasks.base import Chat
from posttrain_gym.inner_trainers.telemetry import EnergyMeter
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl import models
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import ChatTask, write_chat_checkpoint
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import grpo, run, sft

CUDA = torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_modes_of_a_card_are_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"^tf32: it is a mode of CUDA devices, this run is on cpu; leave it False\.$"):
        TrlTrainer(tf32=True)
    with pytest.raises(ValueError, match=r"^vllm: it needs a CUDA device, this run is on cpu; leave it False\.$"):
        TrlTrainer(vllm=True)
    with pytest.raises(ValueError, match=r"^precision: 'bf16' needs a CUDA device"):
        TrlTrainer(precision="bf16")
    fingerprint = TrlTrainer().fingerprint
    assert (fingerprint["tf32"], fingerprint["vllm"], fingerprint["precision"]) == (False, False, "fp32")


def test_vllm_that_is_not_installed_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^vllm: the package is not installed; run `pip install vllm`, or leave it"):
        models.require_vllm(CUDA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    models.require_vllm(CUDA)


@pytest.mark.parametrize("enabled", [True, False])
def test_both_interfaces_of_torch_say_the_same_of_tf32(enabled: bool) -> None:
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    models.set_tf32(enabled, CUDA)
    try:
        assert (products.allow_tf32, convolutions.allow_tf32) == (enabled, enabled)
        assert products.fp32_precision == convolutions.conv.fp32_precision == ("tf32" if enabled else "ieee")
    finally:
        models.set_tf32(False, CUDA)


def test_vllm_reaches_the_config_of_what_samples(
    monkeypatch: pytest.MonkeyPatch, trainer: TrlTrainer, task: TinyTask
) -> None:
    from posttrain_gym.inner_trainers.trl.context import RoundContext

    seen: list[dict[str, Any]] = []
    original = RoundContext.sampling_arguments

    def noted(self: RoundContext) -> dict[str, Any]:
        seen.append(original(self))
        return seen[-1]

    monkeypatch.setattr(RoundContext, "sampling_arguments", noted)
    run(trainer, task, grpo(steps=1, temperature=0.7))
    assert seen == [{"max_completion_length": 4, "temperature": 0.7}]
    monkeypatch.setattr(trainer, "_vllm", True)
    monkeypatch.setattr(models, "require_vllm", lambda device: None)
    report, _ = run(trainer, task, grpo(steps=1))  # vLLM is not there: the library refuses, the round is labelled
    assert seen[-1] == {"max_completion_length": 4, "temperature": 1.0, "use_vllm": True, "vllm_mode": "colocate"}
    assert report.failure is not None and report.failure.kind == "trainer_raised"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_vllm_is_refused_for_conversations_with_a_tool(
    algorithm: str, trainer: TrlTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ChatTask(write_chat_checkpoint(tmp_path), chat=Chat(tool=lambda text: None, max_turns=2))
    recipe = grpo(algorithm=algorithm, mix={"talk": 1.0})
    trainer.check(task, recipe)
    monkeypatch.setattr(trainer, "_vllm", True)
    with pytest.raises(ValueError, match=rf"^vllm: task 'chatty' has a tool, and {algorithm} cannot weigh .* leave it"):
        trainer.check(task, recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_round_on_the_cpu_says_that_there_is_no_card(trainer: TrlTrainer, task: TinyTask) -> None:
    report, _ = run(trainer, task, sft(steps=2))
    assert report.failure is None
    assert report.telemetry == {"device": "cpu", "card": "unavailable", "reason": "device cpu has no NVML card"}
    assert report.peak_memory_bytes is not None and report.peak_memory_bytes > 50 * 2**20
    back = RoundReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert back.telemetry == report.telemetry
    unstarted = trainer.begin(task, sft(steps=2), trainer.base(task), 3)
    unstarted.close()
    assert unstarted.result()[0].telemetry["device"] == "cpu"


def test_telemetry_decides_neither_an_info_nor_whether_two_reports_are_equal(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    report, _ = run(trainer, task, sft(steps=2))
    other = replace(report, telemetry={"device": "cuda:0", "card": "Big", "energy_joules": 7.5})
    assert other == report
    infos = [round_info(Outcome(told, 1.0, 0.5, 0.5, False)) for told in (report, other)]
    assert infos[0] == infos[1]
    assert "telemetry" not in infos[0]
    assert "energy" not in json.dumps(infos[1])


def test_a_person_reads_the_card_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    result: dict[str, Any] = {"recipe": {}, "ignored": [], "ended": "finished", "steps": 2, "failure": None}
    result |= {"scores": {}, "flags": []}
    told = {"device": "cuda:0", "card": "Big [x]", "energy_joules": 7.5, "chosen_by": "CUDA_VISIBLE_DEVICES " * 9}
    print_round(result | {"telemetry": told})
    assert f"card     {json.dumps(told)}" in capsys.readouterr().out.splitlines()
    print_round(result | {"telemetry": {"device": "cpu", "card": "unavailable", "reason": "no card"}})
    assert "card     unavailable (no card)" in capsys.readouterr().out.splitlines()
    print_round(result | {"telemetry": {}})  # a recorded round tells nothing
    assert "card" not in capsys.readouterr().out


@pytest.mark.gpu
def test_a_round_on_a_card_has_its_energy_and_memory(task: TinyTask) -> None:
    trainer = TrlTrainer(device="cuda:0")
    report, _ = run(trainer, task, sft(steps=4))
    assert report.failure is None
    facts = report.telemetry
    assert facts["device"].startswith("cuda")
    assert facts["peak_memory_bytes"] > 0
    assert facts["energy_joules"] == "unavailable" or facts["energy_joules"] >= 0
    assert trainer.fingerprint["precision"] in ("bf16", "fp32")


@pytest.mark.gpu
def test_rounds_in_bf16_and_with_tf32_train_on_a_card(task: TinyTask) -> None:
    for settings in ({"precision": "bf16"}, {"precision": "fp32", "tf32": True}, {"precision": "fp32"}):
        trainer = TrlTrainer(device="cuda:0", **settings)
        for recipe in (sft(steps=2), grpo(steps=2)):
            report, checkpoint = run(trainer, task, recipe)
            assert report.failure is None, report.failure
            assert checkpoint is not None


@pytest.mark.gpu
def test_tf32_rounds_products_only_where_it_is_asked_for() -> None:
    if torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("the card has no TF32")
    generator = torch.Generator("cuda").manual_seed(0)
    left, right = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    errors = {}
    try:
        for enabled in (True, False):
            models.set_tf32(enabled, CUDA)
            errors[enabled] = float(((left @ right).double() - exact).abs().max())
    finally:
        models.set_tf32(False, CUDA)
    assert errors[False] * 10 < errors[True]  # 23 bits of mantissa against 10


@pytest.mark.gpu
def test_the_card_that_is_read_is_the_one_torch_uses_and_its_joules_fit_its_watts() -> None:
    last = torch.cuda.device_count() - 1
    device = torch.device("cuda", last)
    left = torch.randn(2048, 2048, device=device)
    began = time.monotonic()
    with EnergyMeter(device) as meter:
        while time.monotonic() - began < 2.0:
            left @ left
            torch.cuda.synchronize(device)
    seconds = time.monotonic() - began
    if "card" in meter.reasons:
        pytest.skip(f"NVML does not read the card: {meter.reasons['card']}")
    assert meter.identity["chosen_by"] in ("uuid", "pci address", "CUDA_VISIBLE_DEVICES", "only card")
    assert meter.identity["card"] == torch.cuda.get_device_properties(last).name
    assert isinstance(meter.joules, float)
    assert 1.0 < meter.joules < 3000.0 * seconds  # no single card takes 3 kW


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_rollouts_with_vllm_train_on_a_card(task: TinyTask) -> None:
    report, _ = run(TrlTrainer(device="cuda:0", vllm=True), task, grpo(steps=2))
    assert report.failure is None, report.failure
