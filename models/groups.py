"""Relative groups, Eq. 4 of the Meta-Ban paper: who agrees with a user on an arm."""

from __future__ import annotations

import torch
from torch import Tensor


def group_threshold(nu: float, gamma: float) -> float:
    """(ν − 1)/ν · γ: how far two predictions may lie apart within a group."""
    return (nu - 1) / nu * gamma


def relative_groups(pool_predictions: Tensor, own_predictions: Tensor, threshold: float) -> Tensor:
    """Members of the asking user's group for each arm: [N, P] and [N] → bool [N, P]."""
    return (pool_predictions - own_predictions.unsqueeze(-1)).abs() <= threshold


def union_by_request(mask: Tensor, request: Tensor, requests: int) -> Tensor:
    """Users in the group of any arm of a request: bool [N, P] and [N] → bool [R, P]."""
    votes = torch.zeros((requests, mask.shape[1]), dtype=torch.int64, device=mask.device)
    return votes.index_add(0, request, mask.to(torch.int64)) > 0
