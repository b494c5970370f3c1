"""Adjustments: what they accept, how they are written down, and the catalogue that policies choose from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from posttrain_gym.inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, KINDS, Adjustment, catalogue_index


def test_an_adjustment_is_json_whatever_number_it_was_given() -> None:
    assert Adjustment() == Adjustment("none", 1.0)
    assert json.dumps(Adjustment("lr_scale", np.float32(0.5)).to_dict()) == '{"kind": "lr_scale", "value": 0.5}'  # type: ignore[arg-type]
    toward = Adjustment("mix_toward", 0.2, "math")
    assert toward.to_dict() == {"kind": "mix_toward", "value": 0.2, "source": "math"}
    assert Adjustment.from_dict(toward.to_dict()) == toward
    with pytest.raises(ValueError, match=r"unknown key 'valu'. Did you mean 'value'\?"):
        Adjustment.from_dict({"kind": "lr_scale", "valu": 2.0})


@pytest.mark.parametrize("kind", ["batch_size", "steps", "mix", "LR_SCALE", "", ["stop"], None])
def test_what_cannot_change_mid_round_is_refused(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be applied to a running round\..*Known: batch_scale, .*, temperature"
    ):
        Adjustment(kind)


@pytest.mark.parametrize("value", [0, -0.5, 1000.1, float("nan"), float("inf"), "2", True])
def test_a_factor_outside_its_range_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"adjustment\.value: expected a number in \(0, 1000\]"):
        Adjustment("lr_scale", value)


def test_a_source_is_named_exactly_where_one_is_meant() -> None:
    with pytest.raises(ValueError, match=r"'mix_toward' is about one source; name it with source="):
        Adjustment("mix_toward", 0.2)
    with pytest.raises(ValueError, match=r"'lr_scale' is about no source, got 'math'"):
        Adjustment("lr_scale", 0.5, "math")


def test_the_catalogue_has_37_entries_of_every_kind_in_a_fixed_order() -> None:
    assert len(CATALOGUE) == len(set(CATALOGUE_NAMES)) == 37
    assert {entry.kind for entry in CATALOGUE} == set(KINDS)
    assert CATALOGUE_NAMES[:2] == ("none", "stop")
    assert catalogue_index("lr_down") == 7
    sources = ["code", "math"]
    assert CATALOGUE[catalogue_index("mix_toward_2")].adjustment(sources) == Adjustment("mix_toward", 0.2, "math")
    assert CATALOGUE[catalogue_index("mix_away_3")].adjustment(sources) is None
    with pytest.raises(ValueError, match=r"unknown adjustment 'lr_dwn'. Did you mean 'lr_down'\?"):
        catalogue_index("lr_dwn")


@pytest.mark.parametrize("kind", ["lr_scale", "batch_scale", "kl_scale", "gamma_add", "generations_step"])
def test_a_kind_without_a_sensible_default_needs_its_value(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"'{kind}' needs a value, for example "):
        Adjustment(kind)
    assert Adjustment("mix_away", source="math").number == 0.2
    assert Adjustment("hardest_rows").number == 0.5
