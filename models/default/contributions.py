"""Explanation of the default learner's mean.

The mean is wᵀh(z) + (β + Vp_u)ᵀt(z) + b_i + p_uᵀq_i, plus the memory's correction (arms.py), with the user's head w on
h = [1, x, x⊗x, p(z)] of standardised inputs z, and terms t(z). Its blocks, with w₀ of a user without rewards:

    shared = w₀ᵀh(z) + (β + Vp₀)ᵀt(z)      user = (w − w₀)ᵀh(z) + (V(p_u − p₀))ᵀt(z)
    arm = b_i      taste = p_uᵀq_i      memory

w₀ and p₀ are the mean of the prior: μ, or Σ_k π_k c_k.
Columns are gradient × input of shared + user, the trunk's p included, with the slate summary fixed; the intercept is
shared + user at z = 0. The memory is no part of the columns: its kernel is so narrow that its gradient is 0 almost
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from metaban.models.default.arms import QueryArms
from metaban.models.default.inputs import ArmInputs
from metaban.models.default.scoring import memory_correction
from metaban.models.default.served_trunk import ServedTrunk
from metaban.models.default.shared_state import SharedState
from metaban.models.explaining import Contributions
from metaban.models.numerics.arrays import Array, double, zeros
from metaban.models.numerics.slates import Slates
from metaban.models.settings import PosteriorSettings


def posterior_contributions(
    settings: PosteriorSettings,
    inputs: ArmInputs,
    shared_state: SharedState,
    trunk: ServedTrunk | None,
    own: Mapping[str, Array],
    newborn: Array,
    z: Array,
    arms: QueryArms | None,
) -> Contributions:
    """Explanation of n arms of one request, by the brief of its user and the head [D] of a user without rewards.

    Standardised inputs z [n, d], and the arms' effects without wide inputs, None if the learner does not use them.
    """
    basis, last = shared_state.basis, inputs.trunk_column
    nothing = double(zeros((z.shape[0],), z))

    def head_inputs(z: Array) -> Array:
        predicted = zeros((z.shape[0],), z) if trunk is None else trunk.predict(z)
        return double(inputs.head_inputs(basis, z, predicted)[:, : last + 1])  # [n, D − r]

    if settings.heads:
        w, w0 = double(own["head"][0]), double(newborn)
    else:  # the trunk alone
        w = w0 = double(zeros((inputs.head_size,), z))
        w[last] = 1
    h = head_inputs(z)
    first = h @ w0[: last + 1]
    x, known = h[:, 1 : 1 + inputs.seen], h[:, : 1 + inputs.seen]
    by_head = zeros(x.shape, x) + w[1 : 1 + inputs.seen]
    if inputs.products:
        by_head = by_head + through_products(x, w[1 + inputs.seen : last])
    gradient = double(zeros(z.shape, z))  # ∂mean/∂z
    if trunk is not None:
        gradient = gradient + w[last] * trunk.gradient(z)
    if inputs.selected:
        gradient[:, basis["head_columns"]] += by_head
    else:
        through = by_head @ double(basis["directions"]).mT if inputs.narrowed else by_head
        gradient[:, : inputs.head_inputs_count] += through
    shared, user = first, h @ w[: last + 1] - first
    arm, taste, memory = nothing, nothing, nothing
    if arms is not None:
        arm, taste = double(arms.effects), double(arms.factors) @ w[last + 1 :]
        if inputs.wide:
            terms = inputs.wide_inputs(basis, double(z))
            by_all, by_user = (term_coefficients(inputs, shared_state, head[last + 1 :]) for head in (w0, w))
            shared, user = shared + terms @ by_all, user + terms @ (by_user - by_all)
            gradient = gradient + inputs.wide_gradient(basis, double(z), by_user)
    if settings.heads and settings.memory:
        memory, _ = memory_correction(known, Slates([z.shape[0]]), own, shared_state.gain, settings.memory_radius)
    return Contributions(
        columns=gradient * double(z),
        intercept=nothing + head_inputs(zeros((1, z.shape[1]), z)) @ w[: last + 1],
        shared=shared,
        user=user,
        arm=arm,
        taste=taste,
        memory=memory,
    )


def term_coefficients(inputs: ArmInputs, shared: SharedState, tastes: Array) -> Array:
    """β + Vp [W], the coefficients of terms for tastes p [r]."""
    terms = shared.effects.terms
    coefficients = terms.coefficients + zeros(terms.coefficients.shape, terms.coefficients)
    coefficients[: inputs.making_factors] += inputs.factor_inputs(shared.basis, terms.factors @ tastes)
    return coefficients


def through_products(x: Array, weight: Array) -> Array:
    """Gradient [n, c] of Σ weight · `pair_products(x)`: x [n, c], weight [c(c+1)/2]."""
    gradient, start = zeros(x.shape, x), 0
    for i in range(x.shape[-1]):  # few: heads have few inputs when products are on
        row = weight[start : start + x.shape[-1] - i]  # of x_i·x_i, x_i·x_{i+1}, …
        gradient[:, i] += x[:, i:] @ row
        gradient[:, i:] += row * x[:, i : i + 1]
        start += x.shape[-1] - i
    return gradient
