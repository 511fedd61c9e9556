"""Learner settings: presets, refusals and storage."""

from __future__ import annotations

import math
import re
import time
from dataclasses import fields, replace
from typing import Any

import pytest

from metaban.models.default.learner import PosteriorLearner
from metaban.models.features import InputParts
from metaban.models.presets import build_learner
from metaban.models.settings import (
    LIMITS,
    PRESETS,
    SHARED_NUMBERS_MAX,
    USER_NUMBERS_MAX,
    MetaBanSettings,
    PosteriorSettings,
    named_settings,
    stored_settings,
)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_stored_settings_are_restored(preset: Any) -> None:
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
def test_invalid_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        stored_settings({"preset": "paper", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 0), ("width", 2.5), ("depth", 0), ("bins", -1), ("codes_max", -1), ("replayed", 0), ("alpha", -0.1),
        ("alpha", float("nan")), ("trunk", 1), ("heads", "yes"), ("kinds", None), ("memory", 0),
        ("apart", 1), ("trunk_rate", 0), ("trunk_decay", -1), ("steps_per_event", -0.5), ("epoch_steps_max", 0),
        ("head_inputs_max", 0),
        ("head_directions", 0), ("nu", -1), ("memory_samples", 0), ("memory_radius", 0),
        ("epoch_events", 0), ("epoch_growth", -0.1), ("epoch_growth", float("inf")),
        ("user_weight", -1), ("head_directions", 49), ("seed", 1.5), ("seed", "0"),
    ],
)  # fmt: skip
def test_invalid_values_of_the_default_learner_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        named_settings("default", **{name: value})


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_unknown_settings_are_refused(preset: str) -> None:
    with pytest.raises(ValueError, match="unknown learner settings: surprise"):
        named_settings(preset, surprise=1)


@pytest.mark.parametrize(
    ("preset", "foreign"),
    [("default", "user_rate"), ("default", "gamma"), ("paper", "bins"), ("pooled", "kinds")],
)
def test_settings_of_another_learner_are_refused(preset: str, foreign: str) -> None:
    with pytest.raises(ValueError, match=f"unknown learner settings: {foreign}"):
        named_settings(preset, **{foreign: 1})


@pytest.mark.parametrize("preset", ["other", "", "Default"])
def test_unknown_presets_are_refused(preset: str) -> None:
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


def test_state_of_another_format_is_refused_with_what_to_do() -> None:
    stored = named_settings("default").to_json()
    for other in (
        {**stored, "state_format": 1},
        {name: value for name, value in stored.items() if name != "state_format"},
    ):
        with pytest.raises(
            ValueError, match=r"format 1, and this version reads format 5\. Use another namespace, or delete"
        ):
            stored_settings(other)
    assert named_settings("paper").to_json()["state_format"] == 1


def test_structure_of_the_default_learner_is_what_its_tensors_depend_on() -> None:
    """A setting that changes a stored tensor's shape, or the meaning of its numbers, belongs to the structure."""
    settings = named_settings("default")
    kept = named_settings("default", alpha=1.0, nu=2.0, kinds=False, memory=False, trunk_rate=0.1, epoch_events=9)
    assert kept.structure() == settings.structure()
    changes: list[dict[str, int]] = [
        {"seed": 1}, {"members": 3}, {"width": 7}, {"depth": 3}, {"bins": 4}, {"codes_max": 9},
        {"head_inputs_max": 40}, {"head_directions": 5}, {"memory_samples": 5}, {"products_max": 0},
        {"apart": False}, {"trunk": False},
    ]  # fmt: skip
    for change in changes:
        assert named_settings("default", **change).structure() != settings.structure()
    assert {name for change in changes for name in change} | {"preset", "state_format"} == set(settings.structure())


#: Few inputs, many of the arm, many because of a context, and hashed ones.
WIDTHS = (InputParts(6, 4), InputParts(60, 60), InputParts(60, 6, 53), InputParts(129, 64, 64, hashed=True))


def test_shapes_depend_on_the_structure_alone() -> None:
    """Settings outside the structure may change under stored users, so tensor shapes must not depend on them."""

    def shapes(settings: PosteriorSettings) -> list[dict[str, tuple[int, ...]]]:
        learners = [PosteriorLearner(settings, parts) for parts in WIDTHS]
        return [
            learner.fields
            | {name: tuple(value.shape) for name, value in learner.initial_shared().items()}
            | {"notes": (learner.noted,), "start": (learner.start_size,)}
            for learner in learners
        ]

    settings = PosteriorSettings()
    for field in fields(PosteriorSettings):
        if field.name not in settings.structure():
            value = getattr(settings, field.name)
            other = not value if isinstance(value, bool) else value + 1
            assert shapes(replace(settings, **{field.name: other})) == shapes(settings)


# ---------------------------------------------------------------------- limits


NUMBERS = [
    (preset, field.name)
    for preset in sorted(PRESETS)
    for field in fields(PosteriorSettings if preset == "default" else MetaBanSettings)
    if field.type in ("int", "float")
]


@pytest.mark.parametrize(("preset", "name"), NUMBERS)
def test_every_number_has_limits(preset: str, name: str) -> None:
    limits = named_settings(preset).NARROWER.get(name, LIMITS[name])
    whole = isinstance(getattr(named_settings(preset), name), int)
    beyond = [limits.least - 1, limits.most + 1] if whole else [limits.least - 1, limits.most * 1.01, 1e308, 10**400]
    if limits.below:
        beyond.append(limits.most)
    if limits.above:
        beyond.append(limits.least)
    for value in beyond:
        with pytest.raises(
            ValueError, match=rf"^{name} must be (at least|above) .* and (at most|below) {int(limits.most)}$"
        ):
            named_settings(preset, **{name: value})


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_every_limit_belongs_to_a_setting(name: str) -> None:
    assert name in {number for _, number in NUMBERS}
    assert LIMITS[name].least < LIMITS[name].most < math.inf


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("inputs", [1, 13, 4_096])
def test_presets_are_within_all_limits_at_the_largest_input_size(preset: str, inputs: int) -> None:
    build_learner(named_settings(preset), inputs)


@pytest.mark.parametrize(
    ("preset", "inputs", "changes", "blamed"),
    [
        ("default", 3, {"width": 4_000}, "members, width, depth, codes_max and 3 inputs"),
        ("default", 3, {"members": 64, "width": 512}, "members, width, depth, codes_max and 3 inputs"),
        ("default", 1, {"width": 1_024, "depth": 16}, "members, width, depth, codes_max and 1 input make"),
        ("default", 64, {"bins": 1_024, "codes_max": 65_536}, "members, width, depth, codes_max and 64 inputs"),
        ("default", 100_000, {}, "members, width, depth, codes_max and 100000 inputs"),
        ("default", 300, {"memory_samples": 4_096, "head_inputs_max": 256, "head_directions": 256},
         "head_inputs_max, head_directions, products_max, memory_samples and 300 inputs"),
        ("default", 3, {"replayed": 16_384, "epoch_steps_max": 100_000},
         "replayed, epoch_steps_max, members, width, depth, codes_max and 3 inputs"),
        ("paper", 3, {"width": 4_096, "depth": 3}, "width, depth and 3 inputs"),
        ("paper", 200, {"width": 4_096}, "width, depth, checkpoints, recent_samples and 200 inputs"),
        ("paper", 100, {"draw": "uniform", "checkpoints": 256}, "width, depth, checkpoints, recent_samples and 100"),
        ("paper", 100, {"user_steps": 10_000}, "user_steps, width, depth and 100 inputs"),
        ("pooled", 1_000, {"recent_samples": 4_096}, "width, depth, checkpoints, recent_samples and 1000 inputs"),
        ("pooled", 10, {"meta_steps": 10_000, "step_samples": 4_096}, "meta_steps, step_samples, width, depth and 10"),
    ],
)  # fmt: skip
def test_combined_sizes_are_limited(preset: str, inputs: int, changes: dict[str, Any], blamed: str) -> None:
    settings = named_settings(preset, **changes)  # each setting alone is within its limits
    began = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^{re.escape(blamed)}.* more than the [\d,]+ allowed$"):
        build_learner(settings, inputs)
    assert time.perf_counter() - began < 1, "it must be refused before it is built"


def test_the_memory_of_a_trunk_step_is_limited() -> None:
    with pytest.raises(ValueError, match=r"^replayed, members, width and depth make 67,108,864 numbers of a step"):
        named_settings("default", replayed=16_384, members=32, width=64, depth=2)


@pytest.mark.parametrize(
    ("preset", "inputs", "changes"),
    [
        ("default", 5, {"width": 700, "depth": 16, "members": 1}),
        ("default", 64, {"bins": 1_024, "codes_max": 65_536, "width": 31}),
        ("default", 300, {"head_inputs_max": 256, "head_directions": 31, "products_max": 512}),
        ("paper", 5, {"width": 700, "depth": 3}),
        ("paper", 39, {"draw": "uniform", "checkpoints": 256, "user_steps": 1_000}),
    ],
)
def test_the_largest_allowed_learners_are_built_in_seconds(preset: str, inputs: int, changes: dict[str, Any]) -> None:
    began = time.perf_counter()
    learner = build_learner(named_settings(preset, **changes), inputs)
    shared = learner.initial_shared()
    state = learner.initial_user(shared)
    assert time.perf_counter() - began < 10
    assert sum(tensor.numel() for tensor in state.values()) <= USER_NUMBERS_MAX
    assert learner.network_size <= SHARED_NUMBERS_MAX
    assert sum(tensor.numel() for tensor in shared.values()) <= 4 * SHARED_NUMBERS_MAX
