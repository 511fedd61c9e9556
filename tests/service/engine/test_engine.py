"""The engine without HTTP: decisions, the feature layout, rewards and settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.engine.commands import ArmInput, RecommendCommand
from metaban.service.engine.engine import Engine
from metaban.service.errors import DecisionConflict, InvalidInput
from metaban.service.settings.environment import SettingsError, learner_settings
from metaban.store.errors import NotReplicated, StoreError, StoreReset
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from tests.service.apps import PAPER
from tests.service.engines import MakeEngine, ask, reward, settings, worker_running
from tests.worker.workshop import soon


class TestDecisions:
    async def test_first_decision(self, engine: Engine) -> None:
        answer = await engine.decider.recommend(ask(k=3))
        assert [item.rank for item in answer.decision.items] == [1, 2, 3]
        assert len({item.arm_id for item in answer.decision.items}) == 3
        assert all(0 < item.propensity <= 1 for item in answer.decision.items)
        assert all(item.score == pytest.approx(item.mean + item.bonus) for item in answer.decision.items)
        assert (answer.decision.epoch, answer.decision.cold_start, answer.replayed) == (0, "meta", False)

    async def test_repeated_id_gets_the_same_decision(self, engine: Engine, make_engine: MakeEngine) -> None:
        first = await engine.decider.recommend(ask(k=2, decision_id="d"))
        again = await engine.decider.recommend(ask(k=2, decision_id="d"))
        assert not first.replayed
        assert again.replayed
        assert again.decision.items == first.decision.items
        other = make_engine()
        await other.start()
        assert (await other.decider.recommend(ask(k=2, decision_id="d"))).decision.items == first.decision.items

    async def test_repeated_id_with_another_body_is_a_conflict(self, engine: Engine) -> None:
        await engine.decider.recommend(ask(decision_id="d"))
        with pytest.raises(DecisionConflict):
            await engine.decider.recommend(ask(decision_id="d", body="another"))

    async def test_racing_requests_get_one_answer(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(policy="ucb-floor", epsilon=1.0, seed=0), make_engine(policy="squarecb")]
        for engine in engines:
            await engine.start()
            await engine.decider.recommend(ask())
        for number in range(10):
            command = ask(arms=30, k=5, decision_id=f"d{number}")
            answers = await asyncio.gather(*(engines[place % 2].decider.recommend(command) for place in range(6)))
            assert sum(not answer.replayed for answer in answers) == 1
            assert all(answer.decision.items == answers[0].decision.items for answer in answers)
            assert all(answer.decision.policy == answers[0].decision.policy for answer in answers)

    async def test_racing_requests_of_different_bodies(self, engine: Engine) -> None:
        await engine.decider.recommend(ask())
        outcomes = await asyncio.gather(
            engine.decider.recommend(ask(decision_id="d", body="one")),
            engine.decider.recommend(ask(decision_id="d", body="other")),
            return_exceptions=True,
        )
        assert sorted(isinstance(outcome, DecisionConflict) for outcome in outcomes) == [False, True]

    async def test_missing_ids_are_generated(self, engine: Engine) -> None:
        one, other = await engine.decider.recommend(ask()), await engine.decider.recommend(ask())
        assert one.decision.decision_id != other.decision.decision_id


class TestLayout:
    async def test_one_of_racing_first_requests_fixes_the_layout(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(), make_engine()]
        for engine in engines:
            await engine.start()
        outcomes = await asyncio.gather(
            *(engine.decider.recommend(ask(inputs=2 + place)) for place, engine in enumerate(engines)),
            return_exceptions=True,
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidInput)]
        assert len(refused) <= 1
        assert not any(isinstance(outcome, Exception) and outcome not in refused for outcome in outcomes)
        dimensions = [engine.serving.layout.dimension for engine in engines if engine.serving is not None]
        assert len(dimensions) == 2
        assert len(set(dimensions)) == 1

    async def test_concurrent_first_requests_of_one_engine(self, engine: Engine) -> None:
        answers = await asyncio.gather(*(engine.decider.recommend(ask(f"u{number}")) for number in range(10)))
        assert len({answer.decision.decision_id for answer in answers}) == 10

    async def test_request_of_another_dimension_is_refused(self, engine: Engine) -> None:
        await engine.decider.recommend(ask(inputs=3))
        with pytest.raises(InvalidInput) as refused:
            await engine.decider.recommend(ask(inputs=4))
        assert "arms" in str(vars(refused.value))
        assert (await engine.decider.recommend(ask(inputs=3))).decision.items

    async def test_refused_first_request_fixes_no_layout(self, make_engine: MakeEngine, client: Redis) -> None:
        engine = make_engine(max_dimension=5)
        await engine.start()
        with pytest.raises(InvalidInput):
            await engine.decider.recommend(ask(inputs=9))
        record = await NamespaceStore(client).load("shop")
        assert record is not None
        assert record.layout is None
        assert (await engine.decider.recommend(ask(inputs=3))).decision.items

    async def test_layout_survives_a_restart(self, engine: Engine, make_engine: MakeEngine) -> None:
        await engine.decider.recommend(ask(inputs=3))
        again = make_engine()
        await again.start()
        with pytest.raises(InvalidInput):
            await again.decider.recommend(ask(inputs=4))


class TestRewards:
    async def test_rejected_and_accepted_rewards_in_one_batch(self, engine: Engine) -> None:
        await engine.decider.recommend(ask(k=1, decision_id="one"))
        slate = await engine.decider.recommend(ask(k=2, decision_id="two", body="two"))
        shown = [item.arm_id for item in slate.decision.items]
        hidden = next(arm.id for arm in ask().arms if arm.id not in shown)
        outcome = await engine.feedback.accept(
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
        await engine.decider.recommend(ask(decision_id="d"))
        first = await engine.feedback.accept([reward("d"), reward("d")], wait_applied=False)
        again = await engine.feedback.accept([reward("d", 0.0)], wait_applied=False)
        named = await engine.feedback.accept([reward("d", event="e1"), reward("d", event="e2")], wait_applied=False)
        assert (first.accepted, first.duplicates) == (1, 1)
        assert (again.accepted, again.duplicates) == (0, 1)
        assert (named.accepted, named.duplicates) == (2, 0)

    async def test_the_event_carries_what_was_decided(self, engine: Engine, client: Redis) -> None:
        decided = await engine.decider.recommend(ask(k=2, decision_id="d"))
        item = decided.decision.items[1]
        await engine.feedback.accept([reward("d", 0.25, arm=item.arm_id)], wait_applied=False)
        keys = NamespaceKeys("shop", 2)
        stream = EventStream(client, keys, dedupe_window_s=60, backlog_limit=100)
        [delivery] = await stream.read([keys.partition_of("u")], "c", count=10, block_ms=10)
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

    async def test_empty_batch_of_rewards(self, engine: Engine) -> None:
        outcome = await engine.feedback.accept([reward("nowhere")], wait_applied=True)
        assert (outcome.accepted, len(outcome.rejected)) == (0, 1)

    async def test_wait_until_applied(self, engine: Engine, make_engine: MakeEngine, valkey_url: str) -> None:
        async with worker_running(valkey_url):
            for number in range(20):
                await engine.decider.recommend(ask("u", decision_id=f"d{number}"))
                outcome = await engine.feedback.accept([reward(f"d{number}", number % 2)], wait_applied=True)
                assert (outcome.accepted, outcome.applied) == (1, True)
            answer = await engine.decider.recommend(replace(ask("u"), min_version=1))
            assert (answer.decision.cold_start, answer.decision.user_version) == (None, 20)
            assert (await engine.feedback.accept([reward("d3")], wait_applied=True)).applied is True
        other = make_engine()
        await other.start()
        duplicate = await other.feedback.accept([reward("d3")], wait_applied=True)
        assert (duplicate.duplicates, duplicate.applied) == (1, True), "learned before this process was started"

    async def test_wait_times_out_without_a_worker(self, make_engine: MakeEngine) -> None:
        engine = make_engine(wait_applied_timeout_s=0.05)
        await engine.start()
        await engine.decider.recommend(ask(decision_id="d"))
        assert (await engine.feedback.accept([reward("d")], wait_applied=True)).applied is False

    async def test_ids_with_colons_do_not_collide(self, engine: Engine) -> None:
        for decision_id, arm in (("a", "b:c"), ("a:b", "c")):
            command = RecommendCommand("u", (ArmInput(arm, [1.0, 2.0, 3.0]),), None, 1, decision_id, decision_id)
            await engine.decider.recommend(command)
        outcome = await engine.feedback.accept([reward("a"), reward("a:b")], wait_applied=False)
        assert (outcome.accepted, outcome.duplicates) == (2, 0)

    async def test_event_ids_are_per_user(self, engine: Engine) -> None:
        keys = NamespaceKeys("shop", 2)
        one, other = [name for name in (f"user {number}" for number in range(20)) if keys.partition_of(name) == 0][:2]
        await engine.decider.recommend(ask(one, decision_id="d1", body="d1"))
        await engine.decider.recommend(ask(other, decision_id="d2", body="d2"))
        outcome = await engine.feedback.accept([reward("d1", event="1"), reward("d2", event="1")], wait_applied=False)
        assert (outcome.accepted, outcome.duplicates) == (2, 0)


class TestSettings:
    @pytest.mark.parametrize("changes", [{"width": 7}, {"alpha": 0.7, "nu": 2.0}, PAPER, {"samples_kept": 3}])
    @pytest.mark.parametrize("learned", [False, True])
    async def test_the_record_is_followed(
        self, engine: Engine, make_engine: MakeEngine, client: Redis, changes: dict[str, Any], learned: bool
    ) -> None:
        if learned:
            await engine.decider.recommend(ask())
        before = await NamespaceStore(client).load("shop")
        other = make_engine(**changes)
        with structlog.testing.capture_logs() as lines:
            await other.start()
        assert await NamespaceStore(client).load("shop") == before
        assert other.live.learner == engine.live.learner
        assert (await other.decider.recommend(ask("v"))).decision.items
        told = {line["variable"]: line["environment"] for line in lines if line["event"] == "settings_differ"}
        expected = {"preset": "paper"} if changes is PAPER else changes
        assert told == {f"METABAN_{name.upper()}": value for name, value in expected.items()}

    async def test_changed_partitions_are_refused(self, engine: Engine, make_engine: MakeEngine) -> None:
        with pytest.raises(StoreError, match="2 partitions"):
            await make_engine(partitions=3).start()

    async def test_concurrent_starts_with_changed_settings(self, engine: Engine, make_engine: MakeEngine) -> None:
        await engine.decider.recommend(ask())
        others = [make_engine(alpha=0.7) for _ in range(4)]
        await asyncio.gather(*(other.start() for other in others))
        assert {other.live.learner for other in others} == {engine.live.learner}

    def test_variables_reach_the_learner(self) -> None:
        built = learner_settings(settings(seed=5, alpha=0.4, nu=2.0, learner={"bins": 3}))
        assert (built.seed, built.alpha, built.nu, built.bins, built.width) == (5, 0.4, 2.0, 3, 6)
        paper = learner_settings(settings(**PAPER, standardize=False, seed=5, alpha=0.3, learner={"beta2": 2.0}))
        assert (paper.standardize, paper.seed, paper.alpha, paper.beta2, paper.width) == (False, 5, 0.3, 2.0, 6)

    def test_variable_unknown_to_the_preset_is_refused(self) -> None:
        with pytest.raises(SettingsError, match="METABAN_USER_STEPS: the preset default has no such setting"):
            learner_settings(settings(user_steps=2))


class TestHealth:
    async def test_ready(self, engine: Engine) -> None:
        await engine.decider.recommend(ask())

        async def ready() -> bool:
            return all(check.ok for check in (await engine.readiness()).values())

        await soon(ready)
        await engine.refresh_gauges()

    async def test_emptied_store(self, engine: Engine, client: Redis) -> None:
        await engine.decider.recommend(ask(decision_id="d"))
        await client.flushall()
        store = (await engine.readiness())["store"]
        assert (store.ok, store.vital) == (False, True)
        with pytest.raises(StoreReset):
            await engine.feedback.accept([reward("d")], wait_applied=False)
        answer = await engine.decider.recommend(ask(decision_id="e"))
        assert (answer.logged, await client.dbsize()) == (False, 0), "nothing is written into another store"


@pytest.mark.parametrize("changes", [{}, {**PAPER, "standardize": False}], ids=["default", "paper"])
async def test_very_large_features_give_finite_scores_or_a_refusal(
    make_engine: MakeEngine, changes: dict[str, Any]
) -> None:
    engine = make_engine(**changes)
    await engine.start()
    command = RecommendCommand("u", (ArmInput("a", [3e38, -3e38]), ArmInput("b", [1.0, 1.0])), None, 1, None, "x")
    try:
        answer = await engine.decider.recommend(command)
    except InvalidInput:
        return
    assert np.isfinite([item.score for item in answer.decision.items]).all()


async def test_too_few_replicas_are_logged_and_refuse_rewards(make_engine: MakeEngine) -> None:
    engine = make_engine(durability="replicated", replicas=2, replica_wait_ms=50)
    with structlog.testing.capture_logs() as lines:
        await engine.start()
    [told] = [line for line in lines if line["event"] == "replicas_missing"]
    assert (told["wanted"], told["connected"]) == (2, 0)
    decision = await engine.decider.recommend(ask())
    for _ in range(2):
        with pytest.raises(NotReplicated):
            await engine.feedback.accept([reward(decision.decision.decision_id)], wait_applied=False)
