"""Decisions from the catalogue in memory equal those from the store and from arms in the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.service.engine.commands import RecommendCommand
from metaban.service.engine.engine import Connections, Engine
from metaban.service.errors import DecisionConflict, InvalidInput
from metaban.service.telemetry.metrics import Metrics
from metaban.store.catalogue import ArmWrite, CatalogueStore
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.apps import PAPER
from tests.service.engines import MakeEngine, ask, reward, settings, worker_running

LISTS = {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0, -0.5], "c": [0.3, 0.3, 0.3]}


def choose(user: str = "u", **changes: Any) -> RecommendCommand:
    return replace(RecommendCommand(user, (), None, 1, None, "body"), **changes)


async def fill(store: CatalogueStore, arms: dict[str, Any]) -> None:
    await store.change([ArmWrite.put(arm_id, features) for arm_id, features in arms.items()], now_ms=1)


def chosen(answer: Any) -> set[str]:
    return {item.arm_id for item in answer.decision.items}


@pytest.fixture
async def engine(make_engine: MakeEngine) -> Engine:
    engine = make_engine()
    await engine.start()
    return engine


@pytest.fixture
async def filled(engine: Engine) -> Engine:
    await fill(engine._catalogue._store, LISTS)
    return engine


class TestChoosing:
    async def test_choice_from_the_whole_catalogue(self, filled: Engine) -> None:
        answer = await filled.decider.recommend(choose(k=2))
        assert len(answer.decision.items) == 2
        assert chosen(answer) <= set(LISTS)
        assert answer.logged

    async def test_fewer_arms_than_k(self, filled: Engine) -> None:
        assert chosen(await filled.decider.recommend(choose(k=100))) == set(LISTS)
        assert chosen(await filled.decider.recommend(choose(k=3, exclude=frozenset({"b", "nobody"})))) == {"a", "c"}
        assert chosen(await filled.decider.recommend(choose(k=3, arm_ids=("c", "a")))) == {"a", "c"}
        assert chosen(await filled.decider.recommend(choose(k=3, arm_ids=("c", "a"), exclude=frozenset("ab")))) == {"c"}

    async def test_remaining_arms_fill_k(self, make_engine: MakeEngine) -> None:
        engine = make_engine(policy="ucb")
        await engine.start()
        await fill(engine._catalogue._store, LISTS)
        best = (await engine.decider.recommend(choose(k=3))).decision.items
        left = (await engine.decider.recommend(choose(k=2, exclude=frozenset({best[0].arm_id})))).decision.items
        assert [item.arm_id for item in left] == [item.arm_id for item in best[1:]]

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"arm_ids": ("a", "x")}, "arm_ids[1]"),
            ({"arm_ids": ("x", "a"), "exclude": frozenset({"x"})}, "arm_ids[0]"),
            ({"exclude": frozenset(LISTS)}, "exclude"),
            ({"arm_ids": ("a",), "exclude": frozenset({"a"})}, "exclude"),
            ({"context": [1.0]}, "context"),
        ],
    )
    async def test_invalid_choices_are_refused(self, filled: Engine, changes: Any, field: str) -> None:
        await filled.decider.recommend(choose())
        with pytest.raises(InvalidInput) as refused:
            await filled.decider.recommend(choose(**changes))
        assert [error.field for error in refused.value.errors] == [field]

    async def test_empty_catalogue_is_refused(self, engine: Engine) -> None:
        with pytest.raises(InvalidInput, match="PUT /admin/arms") as refused:
            await engine.decider.recommend(choose())
        assert refused.value.errors[0].field == "arms"
        with pytest.raises(InvalidInput) as refused:
            await engine.decider.recommend(choose(arm_ids=("a",)))
        assert refused.value.errors[0].field == "arm_ids[0]"

    async def test_arms_of_the_request_can_be_excluded(self, engine: Engine) -> None:
        command = replace(ask(arms=4, k=2), exclude=frozenset({"arm 1", "arm 3", "x"}))
        answer = await engine.decider.recommend(command)
        assert chosen(answer) == {"arm 0", "arm 2"}
        bad = replace(ask(arms=4), exclude=frozenset({"arm 0"}))
        bad = replace(bad, arms=(*bad.arms[:3], replace(bad.arms[3], features=[1.0])))
        with pytest.raises(InvalidInput) as refused:
            await engine.decider.recommend(bad)
        assert refused.value.errors[0].field == "arms[3].features"

    @pytest.mark.parametrize("changes", [{}, {**PAPER, "policy": "ucb"}], ids=["default", "paper"])
    async def test_scores_equal_those_of_arms_in_the_request(
        self, make_engine: MakeEngine, changes: dict[str, Any]
    ) -> None:
        engine = make_engine(**changes)
        await engine.start()
        brought = ask(arms=30, k=30)
        await fill(engine._catalogue._store, {arm.id: arm.features for arm in brought.arms})
        ordered = replace(brought, arms=tuple(sorted(brought.arms, key=lambda arm: arm.id)))
        ids = tuple(arm.id for arm in ordered.arms)
        for number in range(3):  # scoring must not change the arrays
            same = [
                replace(ordered, decision_id=f"brought {number}"),
                choose(k=30, decision_id=f"all {number}"),
                choose(k=30, arm_ids=ids, decision_id=f"named {number}"),
            ]
            first, *others = [
                {
                    item.arm_id: (item.mean, item.bonus, item.group_size)
                    for item in (await engine.decider.recommend(asked)).decision.items
                }
                for asked in same
            ]
            assert others == [first, first]

    async def test_rewards_of_a_catalogue_decision_are_learned(self, filled: Engine, valkey_url: str) -> None:
        async with worker_running(valkey_url):
            answer = await filled.decider.recommend(choose())
            await filled._catalogue._store.change([ArmWrite.remove(answer.decision.items[0].arm_id)], now_ms=2)
            outcome = await filled.feedback.accept([reward(answer.decision.decision_id)], wait_applied=True)
        assert (outcome.accepted, outcome.applied) == (1, True)


class TestSeveralProcesses:
    async def test_removal_is_seen_by_other_processes(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        await one.start()
        await other.start()
        await fill(one._catalogue._store, LISTS)
        for gone in ("a", "b"):
            assert gone in chosen(await other.decider.recommend(choose(k=9)))
            await one.arms.remove(gone, expected=None)
            for engine in (other, one):
                assert gone not in chosen(await engine.decider.recommend(choose(k=9)))
                with pytest.raises(InvalidInput):
                    await engine.decider.recommend(choose(arm_ids=(gone,)))
        await one.arms.put("a", [9.0, 9.0, 9.0], expected=None)
        assert chosen(await other.decider.recommend(choose(k=9))) == {"a", "c"}

    async def test_changed_features_are_used_at_once(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, LISTS)
        before = await other.decider.recommend(choose(k=9))
        await one.arms.put("b", [5.0, -3.0, 2.0], expected=1)
        after = await other.decider.recommend(choose(k=9))
        bonuses = [{item.arm_id: item.bonus for item in answer.decision.items} for answer in (before, after)]
        assert bonuses[0]["a"] == bonuses[1]["a"]
        assert bonuses[0]["b"] != bonuses[1]["b"]

    async def test_concurrent_requests_during_changes(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, LISTS)
        await one.decider.recommend(choose())
        removed = asyncio.Event()

        async def follow() -> None:
            for _ in range(20):
                gone = removed.is_set()
                assert ("a" in chosen(await other.decider.recommend(choose(k=9)))) in (
                    {False} if gone else {True, False}
                )

        async def change() -> None:
            for number in range(30):
                await one.arms.put(f"x{number}", [float(number), 0.0, 1.0], expected=None)
            await one.arms.remove("a", expected=None)
            removed.set()

        await asyncio.gather(change(), *(follow() for _ in range(8)))
        assert removed.is_set()
        assert len(chosen(await other.decider.recommend(choose(k=99)))) == 32

    async def test_repeated_decision_keeps_a_removed_arm(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, {"a": [1.0]})
        first = await one.decider.recommend(choose(decision_id="d"))
        await one.arms.remove("a", expected=None)
        again = await other.decider.recommend(choose(decision_id="d"))
        assert (again.decision.items, again.replayed) == (first.decision.items, True)
        with pytest.raises(DecisionConflict):
            await other.decider.recommend(choose(decision_id="d", fingerprint="another"))


class TestLayout:
    async def test_catalogue_fixes_the_layout(self, filled: Engine, make_engine: MakeEngine) -> None:
        await filled.decider.recommend(choose(context=[1.0, 2.0]))
        assert filled.serving is not None
        layout = filled.serving.layout
        assert (layout.arm, layout.context, layout.arm_named) == (3, 2, False)
        other = make_engine()
        await other.start()
        with pytest.raises(InvalidInput) as refused:
            await other.decider.recommend(ask(inputs=4))
        assert refused.value.errors[0].field == "arms[0].features"

    async def test_error_names_the_arm_that_does_not_fit(self, filled: Engine) -> None:
        """The arm was stored before the layout was known; requests without it are served."""
        await fill(filled._catalogue._store, {"bad": [1.0], "worse": {"x": 1.0}})
        with pytest.raises(InvalidInput, match="'bad'"):
            await filled.decider.recommend(choose())
        assert filled.serving is None, "nothing is fixed by what does not fit itself"
        assert chosen(await filled.decider.recommend(choose(k=9, exclude=frozenset({"bad", "worse"})))) == set(LISTS)
        with pytest.raises(InvalidInput, match="'bad'") as refused:
            await filled.decider.recommend(choose())
        assert refused.value.errors[0].field == "arms"
        assert "takes 3 numbers, not 1" in refused.value.detail
        with pytest.raises(InvalidInput, match=r"'worse'.*a list of 3 numbers"):
            await filled.decider.recommend(choose(arm_ids=("a", "worse")))
        await filled.arms.put("bad", [1.0, 2.0, 3.0], expected=None)
        await filled.arms.remove("worse", expected=None)
        assert "bad" in chosen(await filled.decider.recommend(choose(k=9)))

    async def test_error_names_the_arm_with_too_large_products(self, make_engine: MakeEngine) -> None:
        engine = make_engine(context_products=True)
        await engine.start()
        await fill(engine._catalogue._store, {"fine": [1.0], "huge": [1e30]})
        with pytest.raises(InvalidInput, match="'huge'"):
            await engine.decider.recommend(choose(context=[1e30]))
        await engine.decider.recommend(choose(context=[1.0]))
        with pytest.raises(InvalidInput, match="'huge'"):
            await engine.decider.recommend(choose(arm_ids=("huge",), context=[1e30]))

    async def test_arm_that_does_not_fit_the_layout_is_refused(self, engine: Engine, make_engine: MakeEngine) -> None:
        other = make_engine()
        await other.start()
        await engine.decider.recommend(ask(inputs=3))
        for each in (engine, other):
            with pytest.raises(InvalidInput, match="takes 3 numbers, not 2") as refused:
                await each.arms.put("a", [1.0, 2.0], expected=None)
            assert refused.value.errors[0].field == "features"
            with pytest.raises(InvalidInput, match="a list of 3 numbers"):
                await each.arms.create("a", {"x": 1.0})
        assert await engine.arms.get("a") is None

    async def test_unreadable_arm_is_left_out(self, filled: Engine, redis: Redis) -> None:
        await redis.hset(filled.live.record.keys.arms, "a", b"[NaN]")
        await fill(filled._catalogue._store, {"d": LISTS["c"]})
        assert chosen(await filled.decider.recommend(choose(k=9))) == {"b", "c", "d"}
        await filled.arms.put("a", LISTS["a"], expected=None)
        assert "a" in chosen(await filled.decider.recommend(choose(k=9)))


class TestOutages:
    @pytest.fixture
    def valkey(self) -> Iterator[OwnValkey]:
        with own_valkey() as server:
            yield server

    @pytest.mark.parametrize("outage", ["serve", "refuse"])
    async def test_catalogue_in_memory_is_used_during_an_outage(
        self, valkey: OwnValkey, outage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
        connections = Connections(valkey.url)
        first, second = (Engine.from_settings(settings(store_outage=outage), connections, Metrics()) for _ in range(2))
        try:
            await first.start()
            await fill(first._catalogue._store, LISTS)
            await first.decider.recommend(choose())
            await second.start()  # loads the catalogue, and gets no request while the store is up
            valkey.kill()
            async with asyncio.timeout(8):
                for engine in (first, second):
                    if outage == "refuse":
                        with pytest.raises(Exception, match="store"):
                            await engine.decider.recommend(choose())
                    else:
                        answer = await engine.decider.recommend(choose(k=9, exclude=frozenset("a")))
                        assert (answer.logged, chosen(answer)) == (False, {"b", "c"})
        finally:
            async with asyncio.timeout(30):
                await first.stop()
                await second.stop()
                await connections.aclose()

    async def test_emptied_store_does_not_empty_the_catalogue(
        self, filled: Engine, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await filled.decider.recommend(choose())
        await redis.flushall()
        answer = await filled.decider.recommend(choose(k=9))
        assert chosen(answer) == set(LISTS)
