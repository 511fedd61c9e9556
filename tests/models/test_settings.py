"""Learner settings: presets, what they refuse, and how they are stored."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from models.posterior import PosteriorLearner
from models.settings import PRESETS, MetaBanSettings, PosteriorSettings, named_settings, stored_settings


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_is_stored_comes_back(preset: Any) -> None:
    settings = named_settings(preset, alpha=0.3, seed=4)
    assert stored_settings(settings.to_json()) == settings
    assert settings.preset == preset
    assert type(settings) is (PosteriorSettings if preset == "default" else MetaBanSettings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preset", "other"), ("width", 0), ("width", 2.5), ("width", True), ("depth", 1), ("user_steps", 0),
        ("user_rate", 0), ("meta_rate", -1), ("meta_rate", float("inf")), ("alpha", -0.1), ("alpha", "1"),
        ("epsilon1", -5), ("xi1", -1), ("z1", float("nan")), ("l1", -1), ("nu", 1), ("gamma", 1), ("gamma", -0.1),
        ("delta", 0), ("delta", 1), ("draw", "first"), ("rate_schedule", 3), ("standardize", 1), ("input_norm", -1),
        ("clip_norm", 0), ("log_constant", 0), ("checkpoints", 0), ("user_weight", -1), ("bonus", "ucb"), ("noise", 0),
    ],
)  # fmt: skip
def test_what_no_learner_could_use_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        stored_settings({"preset": "paper", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 0), ("width", 2.5), ("depth", 0), ("bins", -1), ("codes_max", -1), ("replayed", 0), ("alpha", -0.1),
        ("alpha", float("nan")), ("trunk", 1), ("embed", 1), ("heads", "yes"), ("groups", None), ("memory", 0),
        ("apart", 1), ("trunk_rate", 0), ("trunk_decay", -1), ("steps_per_event", -0.5), ("epoch_steps_max", 0),
        ("head_inputs_max", 0),
        ("head_directions", 0), ("group_spread", 0), ("nu", -1), ("memory_samples", 0), ("memory_radius", 0),
        ("epoch_events", 0), ("epoch_growth", -0.1), ("epoch_growth", float("inf")),
        ("user_weight", -1), ("head_directions", 49), ("seed", 1.5), ("seed", "0"),
    ],
)  # fmt: skip
def test_what_the_default_learner_could_not_use_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        stored_settings({"preset": "default", name: value})


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_is_not_known_is_refused(preset: str) -> None:
    with pytest.raises(ValueError, match="unknown learner settings: surprise"):
        named_settings(preset, surprise=1)


@pytest.mark.parametrize(
    ("preset", "foreign"),
    [("default", "user_rate"), ("default", "gamma"), ("paper", "bins"), ("pooled", "groups")],
)
def test_a_setting_of_another_learner_is_not_known(preset: str, foreign: str) -> None:
    with pytest.raises(ValueError, match=f"unknown learner settings: {foreign}"):
        named_settings(preset, **{foreign: 1})


@pytest.mark.parametrize("preset", ["other", "", "Default"])
def test_a_preset_that_is_not_there_is_refused(preset: str) -> None:
    with pytest.raises(ValueError, match="preset must be one of default, paper, pooled"):
        named_settings(preset)


def test_structure_is_what_stored_tensors_depend_on() -> None:
    settings = named_settings("paper")
    assert named_settings("paper", alpha=1.0, gamma=0.3, user_rate=0.2).structure() == settings.structure()
    for change in (
        {"width": 7},
        {"depth": 3},
        {"seed": 1},
        {"standardize": False},
        {"input_norm": 1.0},
        {"bonus": "posterior"},
    ):
        assert named_settings("paper", **change).structure() != settings.structure()


def test_structure_of_the_default_learner_is_what_its_tensors_depend_on() -> None:
    """Whatever changes the shape of a stored tensor, or what a number in it stands for, belongs to the structure."""
    settings = named_settings("default")
    kept = named_settings("default", alpha=1.0, nu=2.0, groups=False, memory=False, trunk_rate=0.1, epoch_events=9)
    assert kept.structure() == settings.structure()
    changes: list[dict[str, int]] = [
        {"seed": 1}, {"members": 3}, {"width": 7}, {"depth": 3}, {"bins": 4}, {"codes_max": 9},
        {"head_inputs_max": 40}, {"head_directions": 5}, {"memory_samples": 5}, {"embed": False}, {"products_max": 0},
        {"apart": False},
    ]  # fmt: skip
    for change in changes:
        assert named_settings("default", **change).structure() != settings.structure()
    assert {name for change in changes for name in change} | {"preset"} == set(settings.structure())


def test_shapes_depend_on_the_structure_alone() -> None:
    """Settings outside of the structure may change under stored users: no tensor may change its shape with them."""

    def shapes(settings: PosteriorSettings) -> dict[str, tuple[int, ...]]:
        learner = PosteriorLearner(settings, 60)
        return learner.fields | {name: tuple(value.shape) for name, value in learner.initial_shared().items()}

    settings = PosteriorSettings()
    for field in fields(PosteriorSettings):
        if field.name not in settings.structure():
            value = getattr(settings, field.name)
            other = not value if isinstance(value, bool) else value + 1
            assert shapes(replace(settings, **{field.name: other})) == shapes(settings)
