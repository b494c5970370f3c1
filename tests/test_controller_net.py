"""The policy net: what it sees, its forward pass and mask, its file, how it decides, and rules before it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from posttrain_gym.inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, KINDS, Adjustment, catalogue_index
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import SIGNALS
from posttrain_gym.meta_policies.controllers import net as net_file
from posttrain_gym.meta_policies.controllers.base import (
    Controller,
    ControlState,
    Decision,
    catalogue_candidate,
    nothing,
)
from posttrain_gym.meta_policies.controllers.catalogue import controller_names, make_controller
from posttrain_gym.meta_policies.controllers.cloning import from_torch, make_module, to_torch
from posttrain_gym.meta_policies.controllers.features import (
    FEATURE_COUNT,
    FEATURE_NAMES,
    GROUPS,
    LEVEL_SCALES,
    Features,
    describe_features,
    nearest_action,
)
from posttrain_gym.meta_policies.controllers.hybrid import HybridController
from posttrain_gym.meta_policies.controllers.net import HIDDEN, LAYERS, PARAMETER_LIMIT, PolicyNet
from posttrain_gym.meta_policies.controllers.net_controller import NetController

from .controller_states import RECIPE, SOURCES, legal, random_state, settings, signals, state


def random_net(seed: int = 0, **more: Any) -> PolicyNet:
    module = make_module(np.random.default_rng(seed))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)
    return from_torch(module, **{"actions": CATALOGUE_NAMES, "hardware": False, "threshold": 0.0, **more})


def net_for(preferred: dict[str, float], threshold: float = 0.5, **more: Any) -> PolicyNet:
    """Return a net whose logits are the given ones whatever it sees."""
    weights = {name: np.zeros_like(random_net().weights[name]) for name in LAYERS}
    for name, logit in preferred.items():
        weights["output.bias"][catalogue_index(name)] = logit
    return PolicyNet(weights, threshold=threshold, **more)


def entry(vector: np.ndarray, name: str) -> float:
    return float(vector[FEATURE_NAMES.index(name)])


# ---------------------------------------------------------------------------------------------------------- features


def test_features_are_what_the_table_says() -> None:
    features = Features()
    features.begin(RECIPE, SOURCES)
    features.note(Adjustment("lr_scale", 0.5), 2)
    features.note(Adjustment("kl_scale", 1.5), 10)
    shown = signals(loss=3.0, z_loss=-2.5, kl=0.1, grad_cosine=-0.5, broken=["grad_norm"])
    now = settings(learning_rate=1e-4, learning_rate_factor=0.125, batch_size=64.0, kl_coef=0.1 * 2**-3)
    now |= {"mix.easy": 0.5, "mix.hard": 0.5, "gamma": 0.98, "temperature": 1.0}
    vector = features.vector(state(10, shown, settings=now))
    expected = {
        "z.loss": -0.5,
        "present.loss": 1.0,
        "level.loss": 0.75,
        "present.kl": 1.0,
        "level.kl": 0.5,  # its scale is 0.1
        "level.grad_cosine": -0.5 / 1.5,
        "present.reward": 0.0,
        "level.reward": 0.0,
        "setting.learning_rate": 0.0,
        "setting.learning_rate_factor": -0.5,  # 3 of 6 doublings
        "setting.batch_size": 0.25,
        "setting.kl_coef": -0.5,
        "setting.gamma": -0.2,
        "setting.temperature": 0.0,
        "mix.1": 0.5,
        "mix.2": 0.5,
        "mix.3": 0.0,
        "mix_change.1": 0.25,
        "mix_change.2": -0.25,
        "recent.rate": -4 / 12,  # lowered 8 steps ago
        "recent.kl": 1.0,  # raised just now
        "recent.batch": 0.0,
        "progress": 0.1,
        "length": 0.4,
        "early": 8 / 18,
        "broken": 1.0,
    }
    assert {name: entry(vector, name) for name in expected} == pytest.approx(expected, abs=1e-6)
    assert vector.shape == (FEATURE_COUNT,) and vector.dtype == np.float32
    features.begin(RECIPE, SOURCES)
    assert entry(features.vector(state()), "recent.rate") == 0.0  # a new round remembers nothing


def test_features_follow_how_signals_move() -> None:
    features = Features()
    features.begin(RECIPE, SOURCES)
    features.vector(state(1, signals(1, loss=2.0)))
    for _ in range(2):  # a step that was seen counts once
        vector = features.vector(state(2, signals(2, loss=1.0)))
    fast, slow = 2.0 - 1 / 4, 2.0 - 1 / 12
    change, gain = (fast - slow) / slow, (fast - 2.0) / 2.0
    expected = {
        "mean.loss": slow / (slow + 1.0),
        "change.loss": change / (abs(change) + 0.05),
        "gain.loss": gain / (abs(gain) + 0.5),
        "mean.kl": 0.0,
        "change.kl": 0.0,
        "gain.kl": 0.0,
    }
    assert {name: entry(vector, name) for name in expected} == pytest.approx(expected, abs=1e-6)
    absent = features.vector(state(3, signals(3)))
    assert entry(absent, "mean.loss") == entry(vector, "mean.loss")  # what was known stays known


def test_features_stay_in_bounds_and_finite() -> None:
    features = Features(hardware=True)
    recipe = replace(RECIPE, kl_coef=0.0, entropy_coef=0.0)
    features.begin(recipe, ("a", "b", "c", "d", "e"))
    extreme = settings(
        learning_rate=0.0, learning_rate_factor=1e-30, batch_size=1e9, kl_coef=5.0, entropy_coef=1e-9, gamma=-50.0
    )
    rng = np.random.default_rng(0)
    for step in range(1, 200):
        huge = {name: float(value * 10.0 ** rng.integers(0, 300)) for name in SIGNALS if (value := rng.normal())}
        shown = signals(step, (), **huge)
        vector = features.vector(state(step, shown, settings=extreme))
        assert np.isfinite(vector).all() and np.abs(vector).max() <= 1.0
    assert entry(vector, "setting.learning_rate") == -1.0  # a rate of 0 has no logarithm
    assert entry(vector, "setting.kl_coef") == 1.0  # from 0 to something is beyond any range
    assert entry(vector, "setting.learning_rate_factor") == -1.0


def test_clocked_signals_are_absent_unless_asked_for() -> None:
    shown = signals(step_seconds=1.0, z_step_seconds=5.0, loss=1.0)
    plain, clocked = Features(), Features(hardware=True)
    for features in (plain, clocked):
        features.begin(RECIPE, SOURCES)
    kinds = ("z", "present", "level")
    assert [entry(plain.vector(state(shown=shown)), f"{kind}.step_seconds") for kind in kinds] == [0.0, 0.0, 0.0]
    assert [entry(clocked.vector(state(shown=shown)), f"{kind}.step_seconds") for kind in kinds] == [1.0, 1.0, 0.5]
    assert entry(plain.vector(state(shown=shown)), "level.loss") == 0.5


def test_the_feature_table_names_every_entry() -> None:
    prefixes = {name.split(".")[0] for name in FEATURE_NAMES}
    assert prefixes == {name.split(".")[0] for name, _ in describe_features()}
    assert len(set(FEATURE_NAMES)) == FEATURE_COUNT
    assert set(LEVEL_SCALES) <= set(SIGNALS)
    assert set(GROUPS) == set(KINDS) - {"none", "stop"}


@pytest.mark.parametrize(
    ("adjustment", "name"),
    [
        (Adjustment("lr_scale", 0.3), "lr_half"),
        (Adjustment("lr_scale", 0.9), "lr_down"),
        (Adjustment("lr_scale", 1.1), "lr_up"),
        (Adjustment("lr_scale", 3.0), "lr_double"),
        (Adjustment("gamma_add", -0.2), "gamma_down"),
        (Adjustment("mix_toward", 0.05, "hard"), "mix_toward_2"),
        (Adjustment("mix_toward", 0.05, "elsewhere"), None),
    ],
)
def test_the_nearest_entry_keeps_kind_direction_and_source(adjustment: Adjustment, name: str | None) -> None:
    assert nearest_action(adjustment, SOURCES) == (None if name is None else catalogue_index(name))


# --------------------------------------------------------------------------------------------------------------- net


def test_a_net_has_at_most_15_000_parameters_with_the_value_head_of_fine_tuning() -> None:
    net = random_net()
    by_hand = FEATURE_COUNT * 64 + 64 + 64 * 32 + 32 + 32 * 37 + 37
    assert net.parameters == by_hand == sum(p.numel() for p in make_module(np.random.default_rng(0)).parameters())
    assert HIDDEN == (64, 32) and len(CATALOGUE) == 37
    assert PARAMETER_LIMIT == 15_000 and net.parameters <= PARAMETER_LIMIT


def test_the_numpy_forward_equals_the_torch_module() -> None:
    rng, net = np.random.default_rng(0), random_net()
    module = to_torch(net)
    features = Features()
    features.begin(RECIPE, SOURCES)
    for step in range(1, 201):
        seen = random_state(rng, step)
        vector = features.vector(seen)
        with torch.no_grad():
            logits = module(torch.from_numpy(vector)[None])[0]
        mask = torch.tensor(seen.legal)
        wanted = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=0)
        got = net.probabilities(vector, seen.legal)
        np.testing.assert_allclose(net.logits(vector), logits.numpy(), atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(got, wanted.numpy(), atol=1e-6)
        assert (got[~np.array(seen.legal)] == 0.0).all()  # exactly
        assert got.sum() == pytest.approx(1.0, abs=1e-6)


def test_illegal_entries_have_probability_0_however_much_the_net_wants_them() -> None:
    net = net_for({"lr_double": 1000.0, "lr_half": 1.0})
    vector = np.zeros(FEATURE_COUNT, dtype=np.float32)
    odds = net.probabilities(vector, [name != "lr_double" for name in CATALOGUE_NAMES])
    assert odds[catalogue_index("lr_double")] == 0.0
    assert odds.argmax() == catalogue_index("lr_half") and np.isfinite(odds).all()
    assert net.probabilities(vector, [False] * 37).tolist() == [1.0] + [0.0] * 36  # doing nothing is always possible


def test_a_net_never_chooses_what_it_was_not_trained_to() -> None:
    net = net_for({"lr_double": 9.0}, actions=("lr_half", "lr_up"))
    assert net.actions == ("none", "lr_half", "lr_up")  # the catalogue's order, doing nothing among them
    odds = net.probabilities(np.zeros(FEATURE_COUNT, dtype=np.float32), [True] * 37)
    assert odds[catalogue_index("lr_double")] == 0.0
    assert np.flatnonzero(odds).tolist() == [catalogue_index(name) for name in net.actions]
    with pytest.raises(ValueError, match=r"unknown adjustment 'lr_haff'.*lr_half"):
        net_for({}, actions=("lr_haff",))


def test_acting_loads_no_torch(tmp_path: Path) -> None:
    random_net().save(tmp_path / "net.safetensors")
    code = (
        "import sys\n"
        "from posttrain_gym.meta_policies.controllers.net_controller import NetController\n"
        f"NetController({str(tmp_path / 'net.safetensors')!r})\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# -------------------------------------------------------------------------------------------------------------- file


def test_a_saved_net_loads_as_it_was_and_equal_nets_give_equal_bytes(tmp_path: Path) -> None:
    net = replace(
        random_net(actions=("lr_half", "stop")),
        facts={"seed": 3},
        threshold=0.7,
        hardware=True,
        limits={"lr_half": (4, 2)},
    )
    path = net.save(tmp_path / "deep" / "net.safetensors")
    loaded = PolicyNet.load(path)
    assert loaded.limits == {"lr_half": (4, 2)}
    assert (loaded.actions, loaded.threshold, loaded.hardware, loaded.facts) == (
        ("none", "stop", "lr_half"),
        0.7,
        True,
        {"seed": 3},
    )
    assert all((loaded.weights[name] == net.weights[name]).all() for name in LAYERS)
    assert loaded.save(tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert path.stat().st_size < 80_000
    vector = np.linspace(-1, 1, FEATURE_COUNT, dtype=np.float32)
    with torch.no_grad():
        assert np.allclose(to_torch(loaded)(torch.from_numpy(vector)).numpy(), net.logits(vector), atol=1e-6)


def test_a_file_for_another_layout_is_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_net().save(tmp_path / "net.safetensors")
    monkeypatch.setattr(net_file, "FEATURE_NAMES", (*FEATURE_NAMES[:-1], "weather"))
    monkeypatch.setattr(net_file, "CATALOGUE_NAMES", (*CATALOGUE_NAMES[1:], CATALOGUE_NAMES[0]))
    with pytest.raises(ValueError) as error:
        PolicyNet.load(path)
    text = str(error.value)
    assert str(path) in text and "features: the file has broken and it lacks weather" in text
    assert "catalogue: the same names in another order" in text and "signals:" not in text


@pytest.mark.parametrize("kept", [0, 5, 100, 2000, 20_000])
def test_a_cut_file_is_called_damaged(tmp_path: Path, kept: int) -> None:
    path = random_net().save(tmp_path / "net.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"net\.safetensors: damaged \("):
        PolicyNet.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        PolicyNet.load(tmp_path / "missing.safetensors")
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a posttrain-gym policy net"):
        PolicyNet.load(tmp_path / "other.safetensors")
    path = random_net().save(tmp_path / "net.safetensors")
    tensors = load_file(path)
    tensors["hidden_2.bias"][3] = np.nan
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        meta = file.metadata()
    save_file(tensors, tmp_path / "nan.safetensors", meta)
    with pytest.raises(ValueError, match=r"damaged \(policy net: layer 'hidden_2.bias' holds numbers"):
        PolicyNet.load(tmp_path / "nan.safetensors")
    newer = {**json.loads(meta["posttrain_gym"]), "version": 99}
    save_file(tensors, tmp_path / "newer.safetensors", {"posttrain_gym": json.dumps(newer)})
    with pytest.raises(ValueError, match="format version 99, this release reads 1"):
        PolicyNet.load(tmp_path / "newer.safetensors")


# -------------------------------------------------------------------------------------------------------- controller


def begun(controller: Any) -> Any:
    assert isinstance(controller, Controller)
    controller.begin(RECIPE, SOURCES)
    return controller


def test_the_controller_does_the_most_likely_legal_thing() -> None:
    controller = begun(NetController(net_for({"lr_half": 5.0, "lr_up": 6.0, "none": 1.0})))
    decision = controller.decide(state())
    odds = np.exp([5.0, 6.0, 1.0])
    odds = odds / (odds.sum() + 34 - 4)  # slots 3 and 4 have no source; the other logits are 0
    assert decision.chosen.adjustment == Adjustment("lr_scale", 1.25)
    assert decision.chosen.action == catalogue_index("lr_up") and decision.chosen.by == "net"
    assert decision.chosen.confidence == pytest.approx(odds[1], abs=1e-6)
    assert {c.action: c.confidence for c in decision.candidates} == pytest.approx(
        {catalogue_index("lr_half"): odds[0], catalogue_index("lr_up"): odds[1]}, abs=1e-6
    )
    masked = controller.decide(state(mask=[legal()[i] and name != "lr_up" for i, name in enumerate(CATALOGUE_NAMES)]))
    assert masked.chosen.adjustment == Adjustment("lr_scale", 0.5)


def test_below_the_threshold_it_does_nothing_and_says_so() -> None:
    net = net_for({"lr_half": 4.0, "lr_up": 4.0}, threshold=0.5)
    decision = begun(NetController(net)).decide(state())
    assert decision.chosen.adjustment == Adjustment() and decision.chosen.action == 0
    assert decision.held_back == {"net": "lr_half at 0.39 is below 0.50"}
    assert [c.action for c in decision.candidates] == [catalogue_index("lr_half"), catalogue_index("lr_up"), 0]
    assert begun(NetController(net, threshold=0.3)).decide(state()).chosen.adjustment == Adjustment("lr_scale", 0.5)
    with pytest.raises(ValueError, match="threshold"):
        NetController(net, threshold=1.5)


def test_it_decides_the_same_in_equal_rounds_and_never_anything_illegal() -> None:
    controller = begun(NetController(random_net(), threshold=0.0))

    def play() -> list[int | None]:
        rng, chosen = np.random.default_rng(5), []
        controller.begin(RECIPE, SOURCES)
        for step in range(1, 101):
            seen = random_state(rng, step)
            decision = controller.decide(seen)
            assert decision.chosen.action is not None and seen.legal[decision.chosen.action]
            assert all(c.action is not None and seen.legal[c.action] for c in decision.candidates)
            chosen.append(decision.chosen.action)
        return chosen

    first = play()
    assert first == play() and len(set(first)) > 3


def test_limits_hold_whatever_the_net_wants() -> None:
    net = net_for({"lr_double": 9.0}, limits={"lr_double": (3, 2)})
    controller = begun(NetController(net))
    chosen = [controller.decide(state(step)).chosen.adjustment.kind for step in range(1, 9)]
    assert chosen == ["lr_scale", "none", "none", "lr_scale", "none", "none", "none", "none"]  # 3 steps apart, twice
    controller.begin(RECIPE, SOURCES)
    controller.note(Adjustment("lr_scale", 2.0), 1)  # what rules before it did counts too
    assert controller.decide(state(2)).chosen.adjustment == Adjustment()
    assert controller.decide(state(4)).chosen.adjustment == Adjustment("lr_scale", 2.0)
    assert controller.describe()["limits"] == {"lr_double": [3, 2]}
    with pytest.raises(ValueError, match=r"limits\.lr_up: times"):
        net_for({}, limits={"lr_up": (1, 0)})


def test_it_describes_itself(tmp_path: Path) -> None:
    path = replace(random_net(), facts={"seed": 1}).save(tmp_path / "my.safetensors")
    told = NetController(path, threshold=0.25).describe()
    assert told["file"] == "my.safetensors" and len(told["digest"]) == 16 and str(tmp_path) not in json.dumps(told)
    assert told["threshold"] == 0.25 and told["parameters"] == random_net().parameters and told["facts"] == {"seed": 1}


def test_a_mask_that_allows_a_missing_source_is_an_error() -> None:
    controller = begun(NetController(net_for({"mix_toward_4": 9.0})))
    with pytest.raises(ValueError, match="mix_toward_4 is marked legal, but the round has no such source"):
        controller.decide(state(mask=[True] * 37))


# ------------------------------------------------------------------------------------------------------------ hybrid


class Danger:
    """Halves the rate while the KL divergence is above 1."""

    name = "danger"

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        self.sources = sources

    def decide(self, state: ControlState) -> Decision:
        if (state.signals.values["kl"] or 0.0) <= 1.0:
            return Decision(nothing("rules"))
        chosen = catalogue_candidate(catalogue_index("lr_half"), self.sources, "kl_runaway", "KL above 1")
        assert chosen is not None
        return Decision(chosen, (chosen,), flags=("the KL divergence ran away",))

    def describe(self) -> dict[str, Any]:
        return {"controller": "danger"}


def test_rules_come_first_and_the_net_decides_elsewhere() -> None:
    hybrid = begun(HybridController(Danger(), NetController(net_for({"lr_double": 9.0})), calm=3))
    quiet = hybrid.decide(state(10, signals(kl=0.5)))
    assert (quiet.chosen.by, quiet.chosen.adjustment) == ("net", Adjustment("lr_scale", 2.0))
    danger = hybrid.decide(state(11, signals(kl=2.0)))
    assert (danger.chosen.by, danger.chosen.adjustment) == ("kl_runaway", Adjustment("lr_scale", 0.5))
    assert danger.held_back == {"net": "danger: kl_runaway came first"}
    assert {c.by for c in danger.candidates} == {"kl_runaway", "net"} and len(danger.flags) == 1
    held = [hybrid.decide(state(step, signals(kl=0.5))) for step in (12, 13, 14)]
    assert [d.chosen.adjustment.kind for d in held] == ["none", "none", "lr_scale"]  # calm for 3 steps after 11
    assert held[0].held_back == {"net": "danger at step 11: the net holds still for 3 steps"}
    hybrid.begin(RECIPE, SOURCES)
    assert hybrid.decide(state(12, signals(kl=0.5))).chosen.adjustment.kind == "lr_scale"  # a new round forgets
    assert hybrid.describe()["danger"] == {"controller": "danger"}


def test_the_net_sees_what_the_rules_did() -> None:
    seen: list[float] = []

    class Watching(NetController):
        def propose(self, state: ControlState) -> Decision:
            seen.append(entry(self._features.vector(state), "recent.rate"))
            return super().propose(state)

    hybrid = begun(HybridController(Danger(), Watching(net_for({"none": 9.0}))))
    hybrid.decide(state(10, signals(kl=2.0)))
    hybrid.decide(state(18, signals(kl=0.0)))
    assert seen == pytest.approx([0.0, -4 / 12])


# ----------------------------------------------------------------------------------------------------------- by name


def test_nets_and_hybrids_are_made_by_name(tmp_path: Path) -> None:
    path = random_net().save(tmp_path / "my.safetensors")
    net = make_controller(f"net:{path}", threshold=0.9)
    assert isinstance(net, NetController) and net.threshold == 0.9
    hybrid = make_controller(f"hybrid:{path}", calm=0)
    told = hybrid.describe()
    assert isinstance(hybrid, HybridController) and told["calm"] == 0 and told["net"]["file"] == "my.safetensors"
    assert told["danger"]["rules"] and all(rule["danger"] for rule in told["danger"]["rules"])
    for name in controller_names():
        assert make_controller(name).name


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("net", {}, "policy net '': no such file"),
        ("net:missing.safetensors", {}, "policy net 'missing.safetensors': no such file"),
        ("hybrid:missing.safetensors", {}, "policy net 'missing.safetensors': no such file"),
        ("net:missing.safetensors", {"treshold": 1}, "unknown setting 'treshold'.*threshold"),
        ("hybrid:missing.safetensors", {"rules": "defalt"}, "rules defalt: no such file"),
    ],
)
def test_names_that_mean_no_net_are_refused(name: str, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_controller(name, **given)


def test_a_rule_set_without_danger_makes_no_hybrid(tmp_path: Path) -> None:
    rules = tmp_path / "calm.yaml"
    rules.write_text("rules:\n  - {name: a, when: loss > 1, action: lr_half, reason: because}\n")
    net = random_net().save(tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="none is marked `danger: true`"):
        make_controller(f"hybrid:{net}", rules=rules)
