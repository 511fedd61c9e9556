"""Learner settings have limits: each by itself, and what they come to together."""

from __future__ import annotations

import math
import re
import time
from dataclasses import fields
from typing import Any

import pytest

from models.presets import build_learner
from models.settings import (
    LIMITS,
    PRESETS,
    SHARED_NUMBERS_MAX,
    USER_NUMBERS_MAX,
    MetaBanSettings,
    PosteriorSettings,
    named_settings,
)

NUMBERS = [
    (preset, field.name)
    for preset in sorted(PRESETS)
    for field in fields(PosteriorSettings if preset == "default" else MetaBanSettings)
    if field.type in ("int", "float")
]


@pytest.mark.parametrize(("preset", "name"), NUMBERS)
def test_no_number_is_without_limits(preset: str, name: str) -> None:
    limits = LIMITS[name]
    whole = isinstance(getattr(named_settings(preset), name), int)
    beyond = [limits.least - 1, limits.most + 1] if whole else [limits.least - 1, limits.most * 1.01, 1e308, 10**400]
    if limits.below:
        beyond.append(limits.most)
    for value in beyond:
        with pytest.raises(ValueError, match=rf"^{name} must be at least .* and (at most|below) {int(limits.most)}$"):
            named_settings(preset, **{name: value})


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_limits_are_of_settings_that_there_are(name: str) -> None:
    assert name in {number for _, number in NUMBERS}
    assert LIMITS[name].least < LIMITS[name].most < math.inf


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("inputs", [1, 13, 4_096])
def test_presets_are_within_all_limits_with_as_many_inputs_as_requests_may_have(preset: str, inputs: int) -> None:
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
def test_what_settings_come_to_together_is_limited(
    preset: str, inputs: int, changes: dict[str, Any], blamed: str
) -> None:
    settings = named_settings(preset, **changes)  # each of them by itself is within its limits
    began = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^{re.escape(blamed)}.* more than the [\d,]+ allowed$"):
        build_learner(settings, inputs)
    assert time.perf_counter() - began < 1, "it has to be refused before it is built"


def test_a_step_of_the_trunk_is_held_in_memory() -> None:
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
def test_the_largest_learners_that_are_allowed_are_built_in_seconds(
    preset: str, inputs: int, changes: dict[str, Any]
) -> None:
    began = time.perf_counter()
    learner = build_learner(named_settings(preset, **changes), inputs)
    shared = learner.initial_shared()
    state = learner.newborn(shared)
    assert time.perf_counter() - began < 10
    assert sum(tensor.numel() for tensor in state.values()) <= USER_NUMBERS_MAX
    assert learner.network_size <= SHARED_NUMBERS_MAX
    assert sum(tensor.numel() for tensor in shared.values()) <= 4 * SHARED_NUMBERS_MAX
