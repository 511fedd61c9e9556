"""The engine without HTTP: decisions made once, layouts fixed once, rewards taken or refused for a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import structlog
from redis.asyncio import Redis

from models.settings import stored_settings
from service.contracts import ArmInput, RecommendCommand, RewardCommand
from service.engine import Engine
from service.errors import DecisionConflict, InvalidInput
from service.metrics import Metrics
from service.settings import Settings, SettingsError, learner_settings
from store.errors import NotReplicated, StoreError, StoreReset
from store.events import EventStream
from store.keys import NamespaceKeys
from store.namespaces import Namespaces
from tests.service.apps import SMALL
from tests.worker.workshop import soon
from worker.namespace_work import WorkerSettings
from worker.runtime import _run

MakeEngine = Callable[..., Engine]


def settings(**changes: Any) -> Settings:
    return Settings(**{**SMALL, "namespace": "shop", **changes})


@pytest.fixture
async def make_engine(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeEngine]:
    """Makes engines, and stops them in the end."""
    monkeypatch.setattr("service.replica.TAIL_BLOCK_MS", 100)
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine.from_settings(settings(**changes), valkey_url, Metrics()))
        return made[-1]

    yield make
    for engine in made:
        async with asyncio.timeout(30):
            await engine.stop()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> Engine:
    engine = make_engine()
    await engine.start()
    return engine


@asynccontextmanager
async def worker_running(url: str) -> AsyncIterator[None]:
    """A worker of the namespace, in this process."""
    limits = WorkerSettings(samples_kept=20, dedupe_window_s=60, backlog_limit=1_000, candidate_pool=100, device="cpu")
    worker = asyncio.create_task(_run(url, limits))
    try:
        yield
    finally:
        while not (await asyncio.wait([worker], timeout=0.5))[0]:
            worker.cancel()


def ask(
    user: str = "u", *, arms: int = 4, inputs: int = 3, k: int = 1, decision_id: str | None = None, body: str = "body"
) -> RecommendCommand:
    generator = np.random.default_rng(arms * 100 + inputs)
    return RecommendCommand(
        user_id=user,
        arms=tuple(ArmInput(f"arm {place}", generator.normal(size=inputs).tolist()) for place in range(arms)),
        context=None,
        k=k,
        decision_id=decision_id,
        fingerprint=body,
    )


def reward(decision_id: str, value: float = 1.0, *, arm: str | None = None, event: str | None = None) -> RewardCommand:
    return RewardCommand(decision_id, arm, value, event)


class TestDecisions:
    async def test_a_first_one(self, engine: Engine) -> None:
        answer = await engine.recommend(ask(k=3))
        assert [item.rank for item in answer.items] == [1, 2, 3]
        assert len({item.arm_id for item in answer.items}) == 3
        assert all(0 < item.propensity <= 1 for item in answer.items)
        assert all(item.score == pytest.approx(item.mean + item.bonus) for item in answer.items)
        assert (answer.model_version, answer.cold_start, answer.replayed) == (0, "meta", False)

    async def test_the_same_id_gets_the_same_answer(self, engine: Engine, make_engine: MakeEngine) -> None:
        first = await engine.recommend(ask(k=2, decision_id="d"))
        again = await engine.recommend(ask(k=2, decision_id="d"))
        assert not first.replayed
        assert again.replayed
        assert again.items == first.items
        other = make_engine()
        await other.start()
        assert (await other.recommend(ask(k=2, decision_id="d"))).items == first.items

    async def test_the_same_id_with_another_body_is_a_conflict(self, engine: Engine) -> None:
        await engine.recommend(ask(decision_id="d"))
        with pytest.raises(DecisionConflict):
            await engine.recommend(ask(decision_id="d", body="another"))

    async def test_racing_requests_get_one_answer(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(policy="ucb-floor", epsilon=1.0, seed=0), make_engine(policy="squarecb")]
        for engine in engines:
            await engine.start()
            await engine.recommend(ask())
        for number in range(10):
            command = ask(arms=30, k=5, decision_id=f"d{number}")
            answers = await asyncio.gather(*(engines[place % 2].recommend(command) for place in range(6)))
            assert sum(not answer.replayed for answer in answers) == 1
            assert all(answer.items == answers[0].items for answer in answers)
            assert all(answer.policy == answers[0].policy for answer in answers)

    async def test_racing_requests_of_different_bodies(self, engine: Engine) -> None:
        await engine.recommend(ask())
        outcomes = await asyncio.gather(
            engine.recommend(ask(decision_id="d", body="one")),
            engine.recommend(ask(decision_id="d", body="other")),
            return_exceptions=True,
        )
        assert sorted(isinstance(outcome, DecisionConflict) for outcome in outcomes) == [False, True]

    async def test_ids_are_made_up_when_there_is_none(self, engine: Engine) -> None:
        one, other = await engine.recommend(ask()), await engine.recommend(ask())
        assert one.decision_id != other.decision_id


class TestLayout:
    async def test_of_racing_first_requests_one_wins(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(), make_engine()]
        for engine in engines:
            await engine.start()
        outcomes = await asyncio.gather(
            *(engine.recommend(ask(inputs=2 + place)) for place, engine in enumerate(engines)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidInput)]
        assert len(refused) <= 1
        assert not any(isinstance(outcome, Exception) and outcome not in refused for outcome in outcomes)
        dimensions = [engine._serving.layout.dimension for engine in engines if engine._serving is not None]
        assert len(dimensions) == 2
        assert len(set(dimensions)) == 1

    async def test_many_first_requests_of_one_engine(self, engine: Engine) -> None:
        answers = await asyncio.gather(*(engine.recommend(ask(f"u{number}")) for number in range(10)))
        assert len({answer.decision_id for answer in answers}) == 10

    async def test_a_request_of_another_dimension_afterwards(self, engine: Engine) -> None:
        await engine.recommend(ask(inputs=3))
        with pytest.raises(InvalidInput) as refused:
            await engine.recommend(ask(inputs=4))
        assert "arms" in str(vars(refused.value))
        assert (await engine.recommend(ask(inputs=3))).items

    async def test_a_refused_first_request_fixes_nothing(self, make_engine: MakeEngine, client: Redis) -> None:
        engine = make_engine(max_dimension=5)
        await engine.start()
        with pytest.raises(InvalidInput):
            await engine.recommend(ask(inputs=9))
        record = await Namespaces(client).load("shop")
        assert record is not None
        assert record.layout is None
        assert (await engine.recommend(ask(inputs=3))).items

    async def test_it_survives_a_restart(self, engine: Engine, make_engine: MakeEngine) -> None:
        await engine.recommend(ask(inputs=3))
        again = make_engine()
        await again.start()
        with pytest.raises(InvalidInput):
            await again.recommend(ask(inputs=4))


class TestRewards:
    async def test_refusals_by_name_beside_what_is_taken(self, engine: Engine) -> None:
        await engine.recommend(ask(k=1, decision_id="one"))
        slate = await engine.recommend(ask(k=2, decision_id="two", body="two"))
        shown = [item.arm_id for item in slate.items]
        hidden = next(arm.id for arm in ask().arms if arm.id not in shown)
        outcome = await engine.feedback(
            [
                reward("nowhere"),
                reward("one"),
                reward("two"),
                reward("two", arm=hidden),
                reward("two", arm=shown[1]),
                reward("one", arm="no such arm"),
            ],
            wait_applied=False,
        )
        assert (outcome.accepted, outcome.duplicates, outcome.applied) == (2, 0, None)
        assert [(rejection.index, rejection.code) for rejection in outcome.rejected] == [
            (0, "unknown-decision"),
            (2, "arm-required"),
            (3, "unknown-arm"),
            (5, "unknown-arm"),
        ]

    async def test_duplicates_count_once(self, engine: Engine) -> None:
        await engine.recommend(ask(decision_id="d"))
        first = await engine.feedback([reward("d"), reward("d")], wait_applied=False)
        again = await engine.feedback([reward("d", 0.0)], wait_applied=False)
        named = await engine.feedback([reward("d", event="e1"), reward("d", event="e2")], wait_applied=False)
        assert (first.accepted, first.duplicates) == (1, 1)
        assert (again.accepted, again.duplicates) == (0, 1)
        assert (named.accepted, named.duplicates) == (2, 0)

    async def test_the_event_carries_what_was_decided(self, engine: Engine, client: Redis) -> None:
        decided = await engine.recommend(ask(k=2, decision_id="d"))
        item = decided.items[1]
        await engine.feedback([reward("d", 0.25, arm=item.arm_id)], wait_applied=False)
        keys = NamespaceKeys("shop", 2)
        stream = EventStream(client, keys, dedupe_window_s=60, backlog_limit=100)
        [delivery] = await stream.read(keys.partition_of("u"), "c", count=10, block_ms=10)
        event = delivery.event
        assert event is not None
        assert (event.user_id, event.arm_id, event.reward, event.propensity) == (
            "u",
            item.arm_id,
            0.25,
            item.propensity,
        )
        arm = next(arm for arm in ask(k=2).arms if arm.id == item.arm_id)
        assert event.features.tolist() == pytest.approx([*arm.features, 1.0])

    async def test_nothing_at_all(self, engine: Engine) -> None:
        outcome = await engine.feedback([reward("nowhere")], wait_applied=True)
        assert (outcome.accepted, len(outcome.rejected)) == (0, 1)

    async def test_learned_when_waited_for(self, engine: Engine, make_engine: MakeEngine, valkey_url: str) -> None:
        async with worker_running(valkey_url):
            for number in range(20):
                await engine.recommend(ask("u", decision_id=f"d{number}"))
                outcome = await engine.feedback([reward(f"d{number}", number % 2)], wait_applied=True)
                assert (outcome.accepted, outcome.applied) == (1, True)
            answer = await engine.recommend(ask("u"))
            assert answer.cold_start is None
            assert answer.model_version == 1
            assert (await engine.feedback([reward("d3")], wait_applied=True)).applied is True
        other = make_engine()
        await other.start()
        duplicate = await other.feedback([reward("d3")], wait_applied=True)
        assert (duplicate.duplicates, duplicate.applied) == (1, True), "learned before this process was started"

    async def test_without_a_worker_the_wait_ends(self, make_engine: MakeEngine) -> None:
        engine = make_engine(wait_applied_timeout_s=0.05)
        await engine.start()
        await engine.recommend(ask(decision_id="d"))
        assert (await engine.feedback([reward("d")], wait_applied=True)).applied is False

    async def test_decisions_and_arms_with_colons_are_kept_apart(self, engine: Engine) -> None:
        for decision_id, arm in (("a", "b:c"), ("a:b", "c")):
            command = RecommendCommand("u", (ArmInput(arm, [1.0, 2.0, 3.0]),), None, 1, decision_id, decision_id)
            await engine.recommend(command)
        outcome = await engine.feedback([reward("a"), reward("a:b")], wait_applied=False)
        assert (outcome.accepted, outcome.duplicates) == (2, 0)

    async def test_the_event_ids_of_one_user_are_not_those_of_another(self, engine: Engine) -> None:
        keys = NamespaceKeys("shop", 2)
        one, other = [name for name in (f"user {number}" for number in range(20)) if keys.partition_of(name) == 0][:2]
        await engine.recommend(ask(one, decision_id="d1", body="d1"))
        await engine.recommend(ask(other, decision_id="d2", body="d2"))
        outcome = await engine.feedback([reward("d1", event="1"), reward("d2", event="1")], wait_applied=False)
        assert (outcome.accepted, outcome.duplicates) == (2, 0)


class TestSettings:
    async def test_another_structure_under_stored_learners(self, engine: Engine, make_engine: MakeEngine) -> None:
        await engine.recommend(ask())
        with pytest.raises(SettingsError, match="width from 6 to 7"):
            await make_engine(width=7).start()

    async def test_another_preset_under_stored_learners(self, engine: Engine, make_engine: MakeEngine) -> None:
        await engine.recommend(ask())
        other = make_engine(preset="default", width=None, user_steps=None)
        with pytest.raises(SettingsError, match="preset from 'paper' to 'default'"):
            await other.start()

    async def test_another_structure_before_the_first_request(self, engine: Engine, make_engine: MakeEngine) -> None:
        other = make_engine(width=7)
        await other.start()
        assert (await other.recommend(ask())).items

    async def test_what_may_change_is_taken_over(self, engine: Engine, make_engine: MakeEngine, client: Redis) -> None:
        await engine.recommend(ask())
        changed = make_engine(alpha=0.7, user_rate=0.01)
        await changed.start()
        record = await Namespaces(client).load("shop")
        assert record is not None
        stored = stored_settings(record.learner)
        assert (stored.alpha, stored.user_rate) == (0.7, 0.01)

    async def test_other_partitions(self, engine: Engine, make_engine: MakeEngine) -> None:
        with pytest.raises(StoreError, match="2 partitions"):
            await make_engine(partitions=3).start()

    async def test_services_restarted_together_with_changed_settings(
        self, engine: Engine, make_engine: MakeEngine
    ) -> None:
        await engine.recommend(ask())
        await asyncio.gather(*(make_engine(alpha=0.7).start() for _ in range(4)))

    def test_every_variable_reaches_the_learner(self) -> None:
        built = learner_settings(settings(standardize=False, seed=5, alpha=0.3, learner={"beta2": 2.0}))
        assert (built.standardize, built.seed, built.alpha, built.beta2, built.width) == (False, 5, 0.3, 2.0, 6)

    def test_a_variable_that_the_preset_does_not_know(self) -> None:
        with pytest.raises(SettingsError, match="METABAN_USER_STEPS: the preset default has no such setting"):
            learner_settings(settings(preset="default"))


class TestHealth:
    async def test_ready(self, engine: Engine) -> None:
        await engine.recommend(ask())

        async def ready() -> bool:
            return all(check.ok for check in (await engine.readiness()).values())

        await soon(ready)
        await engine.refresh_gauges()

    async def test_a_store_that_forgot_everything(self, engine: Engine, client: Redis) -> None:
        await engine.recommend(ask(decision_id="d"))
        await client.flushall()
        store = (await engine.readiness())["store"]
        assert (store.ok, store.vital) == (False, True)
        with pytest.raises(StoreReset):
            await engine.feedback([reward("d")], wait_applied=False)
        answer = await engine.recommend(ask(decision_id="e"))
        assert (answer.logged, await client.dbsize()) == (False, 0), "nothing is written into another store"


async def test_features_that_overflow_the_learner(make_engine: MakeEngine) -> None:
    engine = make_engine(standardize=False)
    await engine.start()
    command = RecommendCommand("u", (ArmInput("a", [3e38, -3e38]), ArmInput("b", [1.0, 1.0])), None, 1, None, "x")
    try:
        answer = await engine.recommend(command)
    except InvalidInput:
        return
    assert np.isfinite([item.score for item in answer.items]).all()


async def test_too_few_replicas_are_told_at_the_start_and_to_whoever_sends_a_reward(make_engine: MakeEngine) -> None:
    engine = make_engine(durability="replicated", replicas=2, replica_wait_ms=50)
    with structlog.testing.capture_logs() as lines:
        await engine.start()
    [told] = [line for line in lines if line["event"] == "too few replicas"]
    assert (told["wanted"], told["connected"]) == (2, 0)
    decision = await engine.recommend(ask())
    for _ in range(2):
        with pytest.raises(NotReplicated):
            await engine.feedback([reward(decision.decision_id)], wait_applied=False)
