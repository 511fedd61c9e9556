"""Runs: what players are asked and told, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from metaban.bench.shop.player import ShopPlayer, ShownItem
from metaban.bench.shop.players import METHODS, build_player, unavailable
from metaban.bench.shop.runs import WAIT_SLATES, ShopRun, execute, play
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.shop import Places, Shop, ShopRequest, ShopVariant

SMALL = ShopVariant(items=40, users=3)


def shop(variant: ShopVariant = SMALL, seed: int = 200) -> Shop:
    try:
        return Shop(variant, seed=seed)
    except DataMissing as missing:
        pytest.skip(str(missing))


class Recorder(ShopPlayer):
    """Shows the first or the last eligible items, and records the calls."""

    def __init__(self, *, last: bool = False) -> None:
        self.last = last
        self.asked: list[tuple[ShopRequest, Places, Places]] = []
        self.told: list[tuple[int, ShownItem]] = []  # with the number of slates asked for before

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        shown = eligible[::-1][:size] if self.last else eligible[:size]
        self.asked.append((request, eligible, shown))
        return shown

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        self.told += [(len(self.asked), each) for each in feedback]


def test_the_last_ten_clicked_items_are_not_eligible() -> None:
    world, player = shop(), Recorder()
    clicks, _, _ = play(world, player, 400)
    history: dict[int, deque[int]] = {}
    for (request, eligible, shown), count in zip(player.asked, clicks, strict=True):
        clicked = history.setdefault(request.user, deque(maxlen=10))
        assert eligible.tolist() == [item for item in range(40) if item not in clicked]
        liked = world.clicks(world.visit(request.number), shown)
        assert liked.sum() == count
        clicked.extend(shown[liked].tolist())
    assert min(map(len, history.values())) == 10


def test_feedback_of_every_shown_item_arrives_after_the_delay() -> None:
    world, player = shop(), Recorder()
    play(world, player, 300)
    visits = [world.visit(number) for number in range(300)]
    expected = {
        (number, position): visits[number].delay
        for number in range(300)
        for position in range(5)
        if number + visits[number].delay < 300
    }
    found = {(each.request.number, each.position): at - each.request.number for at, each in player.told}
    assert found == expected
    assert len(player.told) == len(expected)
    for _, each in player.told:
        request, _, shown = player.asked[each.request.number]
        assert each.request == request
        assert each.item == shown[each.position]
        assert each.reward == world.clicks(visits[request.number], shown)[each.position]


def test_without_zeros_silence_counts_after_the_wait() -> None:
    world, player = shop(replace(SMALL, clicks_only=True)), Recorder()
    play(world, player, 300)
    for at, each in player.told:
        delay = world.visit(each.request.number).delay
        assert at - each.request.number == (delay if each.reward else WAIT_SLATES)
    assert {each.reward for _, each in player.told} == {0.0, 1.0}


def test_players_meet_the_same_visits_whatever_they_show() -> None:
    first, last = Recorder(), Recorder(last=True)
    for player in (first, last):
        play(shop(), player, 100)
    assert [asked[0] for asked in first.asked] == [asked[0] for asked in last.asked]
    assert [asked[2].tolist() for asked in first.asked] != [asked[2].tolist() for asked in last.asked]


def test_an_invalid_slate_is_refused() -> None:
    class Twice(Recorder):
        def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
            return np.repeat(eligible[:1], size)

    with pytest.raises(ValueError, match="different eligible items"):
        play(shop(), Twice(), 1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_plays_every_variant_the_same_way_twice(method: str) -> None:
    if (reason := unavailable(method)) is not None:
        pytest.skip(reason)
    shop()
    for variant in (
        replace(SMALL, arrivals=True),
        replace(SMALL, features=False),
        replace(SMALL, ids=False, clicks_only=True),
    ):
        run = ShopRun(method, "40x3", variant, 201, 60)
        reported: list[int] = []
        outcome = execute(run, reported.append)
        assert sum(reported) == 60
        assert outcome.clicks.tolist() == execute(run).clicks.tolist()
        assert outcome.decision_ms > 0


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        build_player("magic", shop(), seed=0)
