"""The catalogue in memory: what it says is what the store says, and what requests would have brought themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from service.contracts import RecommendCommand
from service.engine import Engine
from service.errors import DecisionConflict, InvalidInput
from service.metrics import Metrics
from store.catalogue import ArmWrite, CatalogueStore
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.test_engine import MakeEngine, ask, make_engine, reward, settings, worker_running

__all__ = ["make_engine"]

LISTS = {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0, -0.5], "c": [0.3, 0.3, 0.3]}


def choose(user: str = "u", **changes: Any) -> RecommendCommand:
    return replace(RecommendCommand(user, (), None, 1, None, "body"), **changes)


async def fill(store: CatalogueStore, arms: dict[str, Any]) -> None:
    await store.change([ArmWrite.put(arm_id, features) for arm_id, features in arms.items()], now_ms=1)


def chosen(answer: Any) -> set[str]:
    return {item.arm_id for item in answer.items}


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
    async def test_from_all_of_it(self, filled: Engine) -> None:
        answer = await filled.recommend(choose(k=2))
        assert len(answer.items) == 2
        assert chosen(answer) <= set(LISTS)
        assert answer.logged

    async def test_fewer_than_k_are_as_many_as_there_are(self, filled: Engine) -> None:
        assert chosen(await filled.recommend(choose(k=100))) == set(LISTS)
        assert chosen(await filled.recommend(choose(k=3, exclude=frozenset({"b", "nobody"})))) == {"a", "c"}
        assert chosen(await filled.recommend(choose(k=3, arm_ids=("c", "a")))) == {"a", "c"}
        assert chosen(await filled.recommend(choose(k=3, arm_ids=("c", "a"), exclude=frozenset("ab")))) == {"c"}

    async def test_what_is_left_fills_k(self, make_engine: MakeEngine) -> None:
        engine = make_engine(policy="ucb")
        await engine.start()
        await fill(engine._catalogue._store, LISTS)
        best = (await engine.recommend(choose(k=3))).items
        left = (await engine.recommend(choose(k=2, exclude=frozenset({best[0].arm_id})))).items
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
    async def test_what_cannot_be_chosen_from(self, filled: Engine, changes: Any, field: str) -> None:
        await filled.recommend(choose())
        with pytest.raises(InvalidInput) as refused:
            await filled.recommend(choose(**changes))
        assert [error.field for error in refused.value.errors] == [field]

    async def test_an_empty_catalogue_says_what_to_do(self, engine: Engine) -> None:
        with pytest.raises(InvalidInput, match="PUT /admin/arms") as refused:
            await engine.recommend(choose())
        assert refused.value.errors[0].field == "arms"
        with pytest.raises(InvalidInput) as refused:
            await engine.recommend(choose(arm_ids=("a",)))
        assert refused.value.errors[0].field == "arm_ids[0]"

    async def test_arms_that_are_brought_can_be_excluded(self, engine: Engine) -> None:
        command = replace(ask(arms=4, k=2), exclude=frozenset({"arm 1", "arm 3", "x"}))
        answer = await engine.recommend(command)
        assert chosen(answer) == {"arm 0", "arm 2"}
        bad = replace(ask(arms=4), exclude=frozenset({"arm 0"}))
        bad = replace(bad, arms=(*bad.arms[:3], replace(bad.arms[3], features=[1.0])))
        with pytest.raises(InvalidInput) as refused:
            await engine.recommend(bad)
        assert refused.value.errors[0].field == "arms[3].features"

    @pytest.mark.parametrize("preset", ["default", "paper"])
    async def test_scores_are_those_of_the_same_arms_in_a_request(self, make_engine: MakeEngine, preset: str) -> None:
        changes = {"policy": "ucb"} if preset == "paper" else {"preset": preset, "width": None, "user_steps": None}
        engine = make_engine(**changes)
        await engine.start()
        brought = ask(arms=30, k=30)
        await fill(engine._catalogue._store, {arm.id: arm.features for arm in brought.arms})
        ordered = replace(brought, arms=tuple(sorted(brought.arms, key=lambda arm: arm.id)))
        ids = tuple(arm.id for arm in ordered.arms)
        for number in range(3):  # scoring must leave the arrays as they are
            same = [
                replace(ordered, decision_id=f"brought {number}"),
                choose(k=30, decision_id=f"all {number}"),
                choose(k=30, arm_ids=ids, decision_id=f"named {number}"),
            ]
            first, *others = [
                {
                    item.arm_id: (item.mean, item.bonus, item.group_size)
                    for item in (await engine.recommend(asked)).items
                }
                for asked in same
            ]
            assert others == [first, first]

    async def test_rewards_of_a_catalogue_decision_are_learned(self, filled: Engine, valkey_url: str) -> None:
        async with worker_running(valkey_url):
            answer = await filled.recommend(choose())
            await filled._catalogue._store.change([ArmWrite.remove(answer.items[0].arm_id)], now_ms=2)
            outcome = await filled.feedback([reward(answer.decision_id)], wait_applied=True)
        assert (outcome.accepted, outcome.applied) == (1, True)


class TestSeveralProcesses:
    async def test_a_removal_is_seen_by_the_next_request_of_another(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        await one.start()
        await other.start()
        await fill(one._catalogue._store, LISTS)
        for gone in ("a", "b"):
            assert gone in chosen(await other.recommend(choose(k=9)))
            await one.arms.remove(gone, expected=None)
            for engine in (other, one):
                assert gone not in chosen(await engine.recommend(choose(k=9)))
                with pytest.raises(InvalidInput):
                    await engine.recommend(choose(arm_ids=(gone,)))
        await one.arms.put("a", [9.0, 9.0, 9.0], expected=None)
        assert chosen(await other.recommend(choose(k=9))) == {"a", "c"}

    async def test_changed_features_count_at_once(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, LISTS)
        before = await other.recommend(choose(k=9))
        await one.arms.put("b", [5.0, -3.0, 2.0], expected=1)
        after = await other.recommend(choose(k=9))
        means = [{item.arm_id: item.mean for item in answer.items} for answer in (before, after)]
        assert means[0]["a"] == means[1]["a"]
        assert means[0]["b"] != means[1]["b"]

    async def test_many_requests_at_once_while_it_changes(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, LISTS)
        await one.recommend(choose())
        removed = asyncio.Event()

        async def follow() -> None:
            for _ in range(20):
                gone = removed.is_set()
                assert ("a" in chosen(await other.recommend(choose(k=9)))) in ({False} if gone else {True, False})

        async def change() -> None:
            for number in range(30):
                await one.arms.put(f"x{number}", [float(number), 0.0, 1.0], expected=None)
            await one.arms.remove("a", expected=None)
            removed.set()

        await asyncio.gather(change(), *(follow() for _ in range(8)))
        assert removed.is_set()
        assert len(chosen(await other.recommend(choose(k=99)))) == 32

    async def test_a_repeated_decision_stands_though_its_arm_is_gone(self, make_engine: MakeEngine) -> None:
        one, other = make_engine(), make_engine()
        for engine in (one, other):
            await engine.start()
        await fill(one._catalogue._store, {"a": [1.0]})
        first = await one.recommend(choose(decision_id="d"))
        await one.arms.remove("a", expected=None)
        again = await other.recommend(choose(decision_id="d"))
        assert (again.items, again.replayed) == (first.items, True)
        with pytest.raises(DecisionConflict):
            await other.recommend(choose(decision_id="d", fingerprint="another"))


class TestLayout:
    async def test_the_catalogue_may_fix_it(self, filled: Engine, make_engine: MakeEngine) -> None:
        await filled.recommend(choose(context=[1.0, 2.0]))
        assert filled._serving is not None
        layout = filled._serving.layout
        assert (layout.arm, layout.context, layout.arm_named) == (3, 2, False)
        other = make_engine()
        await other.start()
        with pytest.raises(InvalidInput) as refused:
            await other.recommend(ask(inputs=4))
        assert refused.value.errors[0].field == "arms[0].features"

    async def test_an_arm_that_does_not_fit_is_named(self, filled: Engine) -> None:
        """It got in before there was a layout; whoever does not ask for it is served."""
        await fill(filled._catalogue._store, {"bad": [1.0], "worse": {"x": 1.0}})
        with pytest.raises(InvalidInput, match="'bad'"):
            await filled.recommend(choose())
        assert filled._serving is None, "nothing is fixed by what does not fit itself"
        assert chosen(await filled.recommend(choose(k=9, exclude=frozenset({"bad", "worse"})))) == set(LISTS)
        with pytest.raises(InvalidInput, match="'bad'") as refused:
            await filled.recommend(choose())
        assert refused.value.errors[0].field == "arms"
        assert "takes 3 numbers, not 1" in refused.value.detail
        with pytest.raises(InvalidInput, match=r"'worse'.*a list of 3 numbers"):
            await filled.recommend(choose(arm_ids=("a", "worse")))
        await filled.arms.put("bad", [1.0, 2.0, 3.0], expected=None)
        await filled.arms.remove("worse", expected=None)
        assert "bad" in chosen(await filled.recommend(choose(k=9)))

    async def test_products_too_large_name_the_arm(self, make_engine: MakeEngine) -> None:
        engine = make_engine(context_products=True)
        await engine.start()
        await fill(engine._catalogue._store, {"fine": [1.0], "huge": [1e30]})
        with pytest.raises(InvalidInput, match="'huge'"):
            await engine.recommend(choose(context=[1e30]))
        await engine.recommend(choose(context=[1.0]))
        with pytest.raises(InvalidInput, match="'huge'"):
            await engine.recommend(choose(arm_ids=("huge",), context=[1e30]))

    async def test_what_does_not_fit_is_refused_when_a_layout_is_known(
        self, engine: Engine, make_engine: MakeEngine
    ) -> None:
        other = make_engine()
        await other.start()
        await engine.recommend(ask(inputs=3))
        for each in (engine, other):
            with pytest.raises(InvalidInput, match="takes 3 numbers, not 2") as refused:
                await each.arms.put("a", [1.0, 2.0], expected=None)
            assert refused.value.errors[0].field == "features"
            with pytest.raises(InvalidInput, match="a list of 3 numbers"):
                await each.arms.create("a", {"x": 1.0})
        assert await engine.arms.get("a") is None

    async def test_one_that_cannot_be_read_is_left_out(self, filled: Engine, redis: Redis) -> None:
        await redis.hset(filled.live.record.keys.arms, "a", b"[NaN]")
        await fill(filled._catalogue._store, {"d": LISTS["c"]})
        assert chosen(await filled.recommend(choose(k=9))) == {"b", "c", "d"}
        await filled.arms.put("a", LISTS["a"], expected=None)
        assert "a" in chosen(await filled.recommend(choose(k=9)))


class TestOutages:
    @pytest.fixture
    def valkey(self) -> Iterator[OwnValkey]:
        with own_valkey() as server:
            yield server

    @pytest.mark.parametrize("outage", ["serve", "refuse"])
    async def test_what_is_in_memory_is_gone_on_with(
        self, valkey: OwnValkey, outage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.replica.TAIL_BLOCK_MS", 100)
        first, second = (Engine.from_settings(settings(store_outage=outage), valkey.url, Metrics()) for _ in range(2))
        try:
            await first.start()
            await fill(first._catalogue._store, LISTS)
            await first.recommend(choose())
            await second.start()  # loads the catalogue, and is never asked while the store is there
            valkey.kill()
            async with asyncio.timeout(8):
                for engine in (first, second):
                    if outage == "refuse":
                        with pytest.raises(Exception, match="store"):
                            await engine.recommend(choose())
                    else:
                        answer = await engine.recommend(choose(k=9, exclude=frozenset("a")))
                        assert (answer.logged, chosen(answer)) == (False, {"b", "c"})
        finally:
            async with asyncio.timeout(30):
                await first.stop()
                await second.stop()

    async def test_a_store_that_was_emptied_does_not_empty_the_catalogue(
        self, filled: Engine, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await filled.recommend(choose())
        await redis.flushall()
        answer = await filled.recommend(choose(k=9))
        assert chosen(answer) == set(LISTS)
