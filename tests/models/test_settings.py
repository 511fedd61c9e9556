"""Learner settings: presets, what they refuse, and how they are stored."""

from __future__ import annotations

from typing import Any

import pytest

from models.settings import named_settings, stored_settings


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_is_stored_comes_back(preset: Any) -> None:
    settings = named_settings(preset, alpha=0.3, seed=4)
    assert stored_settings(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preset", "other"), ("width", 0), ("width", 2.5), ("width", True), ("depth", 1), ("user_steps", 0),
        ("user_rate", 0), ("meta_rate", -1), ("meta_rate", float("inf")), ("alpha", -0.1), ("alpha", "1"),
        ("epsilon1", -5), ("xi1", -1), ("z1", float("nan")), ("l1", -1), ("nu", 1), ("gamma", 1), ("gamma", -0.1),
        ("delta", 0), ("delta", 1), ("draw", "first"), ("rate_schedule", 3), ("standardize", 1), ("input_norm", -1),
        ("clip_norm", 0), ("log_constant", 0), ("checkpoints", 0), ("user_weight", -1),
    ],
)  # fmt: skip
def test_what_no_learner_could_use_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        stored_settings({"preset": "paper", name: value})


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown learner settings: surprise"):
        named_settings("paper", surprise=1)


def test_structure_is_what_stored_tensors_depend_on() -> None:
    settings = named_settings("paper")
    assert named_settings("paper", alpha=1.0, gamma=0.3, user_rate=0.2).structure() == settings.structure()
    for change in ({"width": 7}, {"depth": 3}, {"seed": 1}, {"standardize": False}, {"input_norm": 1.0}):
        assert named_settings("paper", **change).structure() != settings.structure()
