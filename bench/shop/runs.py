"""Runs of players in the shop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from metaban.bench.core.summaries import Curve
from metaban.bench.shop.player import PlayerSettings, ShopPlayer, ShownItem
from metaban.bench.shop.players import build_player
from metaban.bench.worlds.shop import CLICKED_HIDDEN, DELAY_SLATES, EXAMINATION, Places, Shop, ShopVariant

#: Slates between two progress reports of a run.
REPORT_EVERY: Final = 50

#: Where only clicks are sent, an item without a click is learned with reward 0 after this many slates, as the service
#: does with its setting `default_reward`.
WAIT_SLATES: Final = DELAY_SLATES[1] + 1


@final
@dataclass(frozen=True, slots=True)
class ShopRun:
    """One method in one variant of the shop; `settings` replace the recorded ones of a tuned rival."""

    method: str
    variant_name: str
    variant: ShopVariant
    seed: int
    slates: int
    data: Path | None = None
    settings: PlayerSettings | None = None

    @property
    def label(self) -> str:
        """Method and variant."""
        return f"{self.method} in {self.variant_name}"

    @property
    def rounds(self) -> int:
        """Slates, for the progress bar."""
        return self.slates


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShopOutcome:
    """Result of a run: the clicks of each slate [slates], milliseconds a slate and a shown item, and settings."""

    run: ShopRun
    clicks: Curve
    decision_ms: float
    update_ms: float
    settings: Mapping[str, Any]


def execute(run: ShopRun, report: Callable[[int], None] = lambda slates: None) -> ShopOutcome:
    """Build the shop and the player of a run, and play."""
    shop = Shop(run.variant, seed=run.seed, data=run.data)
    player, settings = build_player(
        run.method, shop, seed=run.seed, variant_name=run.variant_name, settings=run.settings
    )
    with closing(player):
        clicks, decision_ms, update_ms = play(shop, player, run.slates, report)
    return ShopOutcome(run, clicks, decision_ms, update_ms, settings)


def play(
    shop: Shop, player: ShopPlayer, slates: int, report: Callable[[int], None] = lambda slates: None
) -> tuple[Curve, float, float]:
    """Clicks of each slate [slates], and milliseconds of a recommendation and of learning one shown item."""
    clicks = np.zeros(slates)
    latest: list[deque[int]] = [deque(maxlen=CLICKED_HIDDEN) for _ in range(shop.users)]
    #: Feedback by the slate that it arrives before.
    due: dict[int, list[ShownItem]] = {}
    clock = time.perf_counter
    deciding = learning = 0.0
    learned = 0
    for number in range(slates):
        arrived = due.pop(number, [])
        if arrived:
            start = clock()
            player.learn(arrived)
            learning += clock() - start
            learned += len(arrived)
        visit = shop.visit(number)
        request, clicked = visit.request, latest[visit.request.user]
        eligible = without(shop.in_catalogue(number), clicked)
        start = clock()
        shown = player.recommend(request, eligible, len(EXAMINATION))
        deciding += clock() - start
        _check_slate(shown, eligible)
        liked = shop.clicks(visit, shown)
        clicks[number] = liked.sum()
        clicked.extend(shown[liked].tolist())
        for position, (item, click) in enumerate(zip(shown.tolist(), liked.tolist(), strict=True)):
            wait = WAIT_SLATES if shop.variant.clicks_only and not click else visit.delay
            due.setdefault(number + wait, []).append(ShownItem(request, item, position, float(click)))
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            report(REPORT_EVERY)
    report(slates % REPORT_EVERY)
    return clicks, deciding / slates * 1_000, learning / max(1, learned) * 1_000


def without(items: Places, hidden: deque[int]) -> Places:
    """The items [n] that are not hidden."""
    return items[~np.isin(items, list(hidden))] if hidden else items


def _check_slate(shown: Places, eligible: Places) -> None:
    if len(set(shown.tolist())) != len(EXAMINATION) or not np.isin(shown, eligible).all():
        raise ValueError(f"a slate must have {len(EXAMINATION)} different eligible items, not {shown.tolist()}")
