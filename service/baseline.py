"""The kill switch: the namespace's baseline ranking instead of the learner, decided without touching it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from store.decisions import DecidedItem


def baseline_items(arm_ids: Sequence[str], ranking: Sequence[str], k: int) -> tuple[DecidedItem, ...]:
    """The first k of the arms: those of the ranking in its order, then the others in the order they came in."""
    there, ranked = dict.fromkeys(arm_ids), dict.fromkeys(ranking)
    ordered = chain((arm for arm in ranked if arm in there), (arm for arm in arm_ids if arm not in ranked))
    return tuple(
        DecidedItem(arm, rank, score=0.0, mean=0.0, bonus=0.0, propensity=1.0, group_size=1)
        for rank, arm in enumerate(islice(ordered, k), start=1)
    )


def nothing_seen(items: Sequence[DecidedItem]) -> np.ndarray:
    """Inputs of no numbers: the learner is not asked, and will not learn from the decision."""
    return np.empty((len(items), 0), dtype=np.float32)
