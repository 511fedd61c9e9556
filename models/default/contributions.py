"""Explanation of the default learner's mean.

The mean is wᵀh(z) + βᵀt(z) + b_i + p_uᵀq_i, plus the memory's correction (arms.py), with the user's head w on
h = [1, x, x⊗x, p(z)] of standardised inputs z, and terms t(z) that all users share coefficients of. Its blocks, with w₀
of a user without rewards:

    shared = w₀ᵀh(z) + βᵀt(z)      user = (w − w₀)ᵀh(z)      arm = b_i      taste = p_uᵀq_i      memory

w₀ is the prior's mean, mixed with groups and pooled head like all heads.
Columns are gradient × input of shared + user, the trunk's p included, with the slate summary fixed; the intercept is
shared + user at z = 0. The memory is no part of the columns: its kernel is so narrow that its gradient is 0 almost
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metaban.models.default.arms import QueryArms
from metaban.models.default.inputs import ArmInputs
from metaban.models.default.scoring import join_members, memory_correction, split_members, trunk_prediction
from metaban.models.explaining import Contributions
from metaban.models.numerics.arrays import Array, double, rectified, zeros
from metaban.models.numerics.slates import Slates
from metaban.models.settings import PosteriorSettings


def posterior_contributions(
    settings: PosteriorSettings,
    inputs: ArmInputs,
    outline: Any,
    own: Mapping[str, Array],
    newborn: Mapping[str, Array],
    z: Array,
    arms: QueryArms | None,
) -> Contributions:
    """Explanation of n arms of one request, by the briefs of its user and of a user without rewards.

    Standardised inputs z [n, d], and the arms' effects without wide inputs, None if the learner does not use them.
    """
    ramps, last = outline["ramps"], inputs.trunk_column
    nothing = double(zeros((z.shape[0],), z))

    def head_inputs(z: Array) -> Array:
        predicted = zeros((z.shape[0],), z)
        if inputs.trunk:
            predicted = trunk_prediction(outline["layers"], ramps.values(z) if ramps else z)
        return double(inputs.head_inputs(outline, z, predicted)[:, : last + 1])  # [n, D − r]

    def head(user: Mapping[str, Array]) -> Array:
        if settings.heads:
            return double(user["heads"][0, :, -1])
        trunk_alone = double(zeros((inputs.head_size,), z))
        trunk_alone[last] = 1
        return trunk_alone

    w, h = head(own), head_inputs(z)
    first = h @ head(newborn)[: last + 1]
    x, known = h[:, 1 : 1 + inputs.seen], h[:, : 1 + inputs.seen]
    by_head = zeros(x.shape, x) + w[1 : 1 + inputs.seen]
    if inputs.products:
        by_head = by_head + through_products(x, w[1 + inputs.seen : last])
    gradient = double(zeros(z.shape, z))  # ∂mean/∂z
    if inputs.trunk:
        delta = through_layers(outline["layers"], ramps.values(z) if ramps else z)
        gradient = gradient + w[last] * double(ramps.gradient(z, delta) if ramps else delta)
    if inputs.selected:
        gradient[:, outline["head_columns"]] += by_head
    else:
        through = by_head @ double(outline["directions"]).mT if inputs.narrowed else by_head
        gradient[:, : inputs.head_inputs_count] += through
    shared, arm, taste, memory = first, nothing, nothing, nothing
    if arms is not None:
        arm, taste = double(arms.effects), double(arms.factors) @ w[last + 1 :]
        if inputs.wide:
            weights, inputs_z = double(outline["wide_weights"]), double(z)
            shared = shared + inputs.wide_inputs(outline, inputs_z) @ weights
            gradient = gradient + inputs.wide_gradient(outline, inputs_z, weights)
    if settings.heads and settings.memory:
        memory, _ = memory_correction(known, Slates([z.shape[0]]), own, outline["gain"], settings.memory_radius)
    return Contributions(
        columns=gradient * double(z),
        intercept=nothing + head_inputs(zeros((1, z.shape[1]), z)) @ w[: last + 1],
        shared=shared,
        user=h @ w[: last + 1] - first,
        arm=arm,
        taste=taste,
        memory=memory,
    )


def through_products(x: Array, weight: Array) -> Array:
    """Gradient [n, c] of Σ weight · `pair_products(x)`: x [n, c], weight [c(c+1)/2]."""
    gradient, start = zeros(x.shape, x), 0
    for i in range(x.shape[-1]):  # few: heads have few inputs when products are on
        row = weight[start : start + x.shape[-1] - i]  # of x_i·x_i, x_i·x_{i+1}, …
        gradient[:, i] += x[:, i:] @ row
        gradient[:, i:] += row * x[:, i : i + 1]
        start += x.shape[-1] - i
    return gradient


def through_layers(layers: Sequence[tuple[Array, Array]], x: Array) -> Array:
    """Gradient [n, inputs] of `scoring.trunk_prediction`, with the same arguments."""
    (first, start), *hidden, (last, _) = layers
    y, active = x @ first + start, []
    for weight, offset in hidden:
        active.append(y > 0)
        y = join_members(split_members(rectified(y), weight) @ weight) + offset
    delta = last * (y > 0)  # [n, M·m]
    for (weight, _), alive in zip(reversed(hidden), reversed(active), strict=True):
        delta = join_members(split_members(delta, weight) @ weight.mT) * alive
    return delta @ first.mT
