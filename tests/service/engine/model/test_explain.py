"""Explanations and groups over HTTP, with real learners, a store and a worker."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.models.features import FeatureLayout
from metaban.models.policies import Slate
from metaban.models.settings import LearnerSettings, named_settings
from metaban.service.engine.model.batcher import Batcher
from metaban.service.engine.model.explain import Explainer, ExplainRequest
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, Chosen, Draw, ScoreRequest
from metaban.service.errors import Overloaded
from metaban.service.http.schemas.recommend import EXPLANATION_EXAMPLE
from metaban.service.telemetry.metrics import Metrics
from tests.own_valkey import own_valkey
from tests.service.apps import PAPER, served, teach
from tests.service.apps import SHOP_ARMS as ARMS
from tests.service.engine.model.served_models import adopt, ask, everything, group_sizes, make_model, put_each, state
from tests.service.engines import worker_running
from tests.worker.workshop import INPUTS, small_paper

DEFAULT: dict[str, Any] = {"preset": "default", "width": 5}
LAYOUT = FeatureLayout(INPUTS, 0, False, False, False, False)


LEARNERS = [
    small_paper(gamma=0.6),
    small_paper(gamma=0.6, preset="pooled"),
    named_settings("default", width=5, bins=3, memory_samples=4),
]


def presets() -> Any:
    changes = [DEFAULT, {"preset": "paper", "width": 32}, {"preset": "pooled", "width": 32}]
    return pytest.mark.parametrize("changes", changes, ids=lambda each: each["preset"])


def taught_model(settings: LearnerSettings) -> ServedModel:
    """Four users in the pool, and two guests."""
    model = make_model(settings=settings, pool=4, guests=4)
    put_each(model, [state(model, f"u{n}", 1 + n) for n in range(6)])
    return model


def question(user: str, arms: int = 5) -> ExplainRequest:
    asked = ask(user, arms)
    return ExplainRequest(asked, asked.inputs.tolist().__getitem__, None)


def adds_up(told: dict[str, Any]) -> None:
    parts = [each["contribution"] for each in told["contributions"]]
    parts += [told[name] for name in ("absent", "intercept", "arm", "taste", "memory", "other")]
    assert math.fsum(parts) == pytest.approx(told["mean"], rel=1e-12, abs=1e-12)
    blocks = [told[name] for name in ("shared", "user", "arm", "taste", "memory")]
    assert math.fsum(blocks) == pytest.approx(told["mean"], rel=1e-5, abs=1e-5)
    assert told["looks"] > 0


@pytest.mark.parametrize("settings", LEARNERS, ids=lambda each: each.preset)
@pytest.mark.parametrize("user", ["u1", "u5", "stranger"])
async def test_groups_match_the_scored_group_sizes(settings: LearnerSettings, user: str, compute: Executor) -> None:
    model = taught_model(settings)
    explainer = Explainer(model, LAYOUT, compute)
    asked = question(user)

    def last_first(scores: ArmScores) -> Slate:
        return Slate((4, 0, 2), (1.0, 1.0, 1.0))

    chosen, told = await explainer.choose(asked, last_first)
    [alone], slate, sizes = model.score([asked.asked]), chosen.slate, group_sizes(model, asked.asked)
    assert slate.chosen == (4, 0, 2)
    np.testing.assert_array_equal(chosen.scores.mean, alone.mean)
    assert [each.group_size for each in told] == chosen.group_sizes == [sizes[row] for row in slate.chosen]
    assert [each.mean for each in told] == [float(alone.mean[row]) for row in slate.chosen]
    assert {each.pool_size for each in told} == {4 if user == "u1" else 5}
    for place, row in enumerate(slate.chosen):
        single = ask(user).__class__(user, asked.asked.inputs[row : row + 1])
        group = await explainer.group(single, 10)
        assert [group.group_size] == [len(group.members)] == group_sizes(model, single)
        assert group.members[0].user_id == user
        assert group.members[0].prediction == group.prediction
        assert all(member.distance <= group.threshold for member in group.members)
        distances = [member.distance for member in group.members]
        assert distances == sorted(distances)
        held = {each: model.holds(each) for each in model.users()}
        assert [member.events for member in group.members[1:]] == [
            standing.version for member in group.members[1:] if (standing := held[member.user_id]) is not None
        ]
        if settings.preset != "pooled":  # its groups are of all arms of a request
            predictions = [member.prediction for member in group.members]
            assert told[place].members_mean == pytest.approx(np.mean(predictions), abs=1e-6)
            assert told[place].members_spread == pytest.approx(np.std(predictions), abs=1e-6)


async def test_looks_are_those_of_the_place(compute: Executor) -> None:
    model, looks = make_model(), np.linspace(1.0, 0.25, 16)
    adopt(model, 1, arm_looks=looks)
    _, told = await Explainer(model, LAYOUT, compute).choose(question("u"), lambda _: Slate((4, 0, 2), (1.0, 1.0, 1.0)))
    assert [each.looks for each in told] == looks[:3].tolist()


async def test_fewer_members_are_listed_than_there_are(compute: Executor) -> None:
    model = make_model(pool=10)
    put_each(model, [state(model, f"u{n}", 1 + n) for n in range(6)])
    explainer = Explainer(model, LAYOUT, compute)
    whole, short = await explainer.group(ask("u2", 1), 100), await explainer.group(ask("u2", 1), 3)
    assert whole.group_size == short.group_size == 6
    assert short.members == whole.members[:3]
    assert (await explainer.group(ask("u2", 1), 1)).members == whole.members[:1]


async def test_too_many_explanations_are_refused(compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.service.engine.model.explain.EXPLAINING_MAX", 3)
    explainer = Explainer(make_model(), LAYOUT, compute)
    outcomes = await asyncio.gather(*(explainer.group(ask("u", 1), 9) for _ in range(5)), return_exceptions=True)
    assert [isinstance(outcome, Overloaded) for outcome in outcomes] == [False, False, False, True, True]
    assert (await explainer.group(ask("u", 1), 9)).group_size == 1


async def test_scoring_waits_for_at_most_one_explanation(compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = make_model(), threading.Event()
    order: list[str] = []  # what the thread does
    choose, look = model.choose, model.view

    def chosen(asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        order.append("plain")
        return choose(asked)

    def looked(asked: ScoreRequest) -> Any:
        order.append("why")
        return look(asked)

    monkeypatch.setattr(model, "choose", chosen)
    monkeypatch.setattr(model, "view", looked)
    explainer, scorer = Explainer(model, LAYOUT, compute), Batcher(model, compute, Metrics().of("shop"))
    compute.submit(held.wait)

    explaining = [asyncio.create_task(explainer.group(ask("u", 1), 9)) for _ in range(4)]
    await asyncio.sleep(0)
    plain = asyncio.create_task(scorer.choose(ask("u"), everything))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(plain, *explaining)
    assert order == ["why", "plain", "why", "why", "why"]


@presets()
async def test_explanation_of_a_decision(
    redis: Redis, valkey_url: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with served(valkey_url, tmp_path, **changes) as client, worker_running(valkey_url):
        await teach(client, "ann", [1, 0, 1])
        await teach(client, "bob", [0, 1])
        body = {"user_id": "ann", "arms": ARMS, "k": 3}
        plain = (await client.post("/recommend", json=body)).json()
        assert all("explanation" not in item for item in plain["items"])
        answer = (await client.post("/recommend", json={**body, "explain": True})).json()
        assert answer["user_version"] == 3
        assert {item["arm_id"]: item["mean"] for item in answer["items"]} == pytest.approx(
            {item["arm_id"]: item["mean"] for item in plain["items"]}, rel=1e-5
        )
        for item in answer["items"]:
            told = item["explanation"]
            assert [told[name] for name in ("mean", "bonus", "group_size")] == [
                item[name] for name in ("mean", "bonus", "group_size")
            ]
            assert told["pool_size"] == 2
            assert told["agreement"] == told["group_size"] / 2
            adds_up(told)
            assert set(told) == set(EXPLANATION_EXAMPLE)
            assert told["absent"] == 0, "lists have no names"
            if changes != DEFAULT:
                assert [told[name] for name in ("arm", "taste", "memory", "looks")] == [0, 0, 0, 1]
            sizes = [abs(each["contribution"]) for each in told["contributions"]]
            assert sizes == sorted(sizes, reverse=True)
            assert 0 < len(sizes) <= 3
            features = next(arm["features"] for arm in ARMS if arm["id"] == item["arm_id"])
            for each in told["contributions"]:
                place = int(each["feature"].removeprefix("arm[").removesuffix("]"))
                assert each["value"] == pytest.approx(features[place])


async def test_explanation_of_a_stored_decision(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with (
        served(valkey_url, tmp_path) as client,
        served(valkey_url, tmp_path) as other,
        worker_running(valkey_url),
    ):
        await teach(client, "ann", [1, 0])
        body = {"user_id": "ann", "arms": ARMS, "k": 2, "decision_id": "d"}
        first = (await client.post("/recommend", json=body)).json()
        again = (await client.post("/recommend", json={**body, "explain": True})).json()
        assert [item["arm_id"] for item in again["items"]] == [item["arm_id"] for item in first["items"]]
        for item in again["items"]:
            assert item["explanation"]["mean"] == pytest.approx(item["mean"], rel=1e-5)
            adds_up(item["explanation"])
        # A process that does not hold the user loads them and gives the same answer.
        elsewhere = (await other.post("/recommend", json={**body, "explain": True})).json()
        assert all(item["explanation"] is not None for item in elsewhere["items"])
        await teach(client, "ann", [1])
        later = (await client.post("/recommend", json={**body, "explain": True})).json()
        assert [item["explanation"] for item in later["items"]] == [None, None]
        assert [{**item, "explanation": 0} for item in later["items"]] == [
            {**item, "explanation": 0} for item in first["items"]
        ]
        assert later["user_version"] == first["user_version"] == 2
        refused = await client.post("/recommend", json={**body, "k": 1, "explain": True})
        assert refused.status_code == 409


async def test_racing_requests_get_the_same_explanation(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path, policy="ucb-floor", epsilon=1.0) as client:
        body = {"user_id": "ann", "arms": ARMS, "k": 2, "decision_id": "d", "explain": True}
        answers = [each.json() for each in await asyncio.gather(*(client.post("/recommend", json=body) for _ in "123"))]
        for answer in answers:
            assert answer["items"] == answers[0]["items"]
            assert answer["items"][0]["explanation"] is not None


async def test_explanation_uses_feature_names_of_the_client(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Hashed features, a context and products: with 64 places some names collide."""
    changes = {**DEFAULT, "hash_dimension": 8, "context_products": True}
    arms = [
        {"id": f"a{n}", "features": {"price": 2.5 + n, "kind": f"k{n}", "vegan": True, "size": n}} for n in range(4)
    ]
    body = {"user_id": "ann", "arms": arms, "context": {"hour": 8, "sky": "grey"}, "k": 4}
    async with served(valkey_url, tmp_path, **changes) as client, worker_running(valkey_url):
        for reward in (1, 0, 1, 0):
            asked = (await client.post("/recommend", json={**body, "k": 1})).json()
            told = {"decision_id": asked["decision_id"], "reward": reward}
            assert (await client.post("/feedback?wait=applied", json=told)).json()["applied"]
        answer = (await client.post("/recommend", json={**body, "explain": True})).json()
    known_context = {"hour", "sky=grey"}
    seen = set()
    for item in answer["items"]:
        place = item["arm_id"][1:]
        known_arm = {"price", f"kind=k{place}", "vegan", "size"}
        adds_up(item["explanation"])
        for each in item["explanation"]["contributions"]:
            left, _, right = each["feature"].partition(" × ")
            names = set(left.split(" | "))
            assert names <= known_arm or (not right and names <= known_context), each
            assert not right or set(right.split(" | ")) <= known_context, each
            seen |= names
            if each["feature"] == "price":
                assert each["value"] == pytest.approx(2.5 + int(place))
            if each["feature"] == "hour":
                assert each["value"] == 8
    assert len(seen) > 3


async def test_features_that_an_arm_does_not_have(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Tea is bought often, coffee never: that an arm is no coffee counts for it, and has no name of the arm."""
    arms = [{"id": kind, "features": {"kind": kind, "year": 1972}} for kind in ("tea", "coffee", "milk")]
    async with served(valkey_url, tmp_path, samples_kept=64) as client, worker_running(valkey_url):
        for turn in range(12):
            bought = "milk" if turn % 4 == 0 else "tea"
            asked = (await client.post("/recommend", json={"user_id": "ann", "arms": arms, "k": 3})).json()
            events = [
                {"decision_id": asked["decision_id"], "arm_id": item["arm_id"], "reward": int(item["arm_id"] == bought)}
                for item in asked["items"]
            ]
            answer = await client.post("/feedback?wait=applied", json={"events": events})
            assert answer.json()["applied"], answer.text
        body = {"user_id": "ann", "arms": arms, "k": 3, "explain": True, "min_version": 1}
        answer = await client.post("/recommend", json=body)
    told = {item["arm_id"]: item["explanation"] for item in answer.json()["items"]}
    for kind, each in told.items():
        adds_up(each)
        # The year is the same for all: it contributes nothing.
        assert [named["feature"] for named in each["contributions"]] == [f"kind={kind}"]
        assert each["contributions"][0]["value"] == 1
    assert told["tea"]["contributions"][0]["contribution"] > 0
    assert told["tea"]["absent"] > told["coffee"]["absent"]
    assert answer.json()["items"][0]["explanation"]["looks"] == 1


async def test_explanation_of_a_new_user_has_no_block_of_the_user(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with served(valkey_url, tmp_path) as client, worker_running(valkey_url):
        for user in ("ann", "bob"):
            await teach(client, user, [1, 0, 1, 0, 1, 1, 0, 1, 1])
        body = {"user_id": "never seen", "arms": ARMS, "k": 3, "explain": True}
        answer = (await client.post("/recommend", json=body)).json()
        for item in answer["items"]:
            told = item["explanation"]
            adds_up(told)
            assert (told["user"], told["memory"]) == (pytest.approx(0, abs=1e-6), 0)
            assert told["shared"] + told["arm"] + told["taste"] == pytest.approx(item["mean"], abs=1e-6)


async def test_explanation_length_is_bounded(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    many = {f"{'n' * 200}{place}": 1e-5 * place for place in range(1, 1_001)}
    changes = {**PAPER, "width": 32, "hash_dimension": 4}  # its contributions are not 0 without rewards
    async with served(valkey_url, tmp_path, **changes) as client:
        body = {"user_id": "u", "arms": [{"id": "a", "features": many}], "explain": True}
        answer = (await client.post("/recommend", json=body)).json()
    told = answer["items"][0]["explanation"]["contributions"]
    assert 0 < len(told) <= 4
    assert all(each["feature"].count(" | ") <= 5 and each["feature"].endswith("…") for each in told)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e-30, 0.0])
@presets()
async def test_extreme_numbers(
    redis: Redis, valkey_url: str, tmp_path: Path, changes: dict[str, Any], value: float
) -> None:
    async with served(valkey_url, tmp_path, **changes) as client:
        arms = [{"id": "a", "features": [value, 1.0, value]}, {"id": "b", "features": [0, 0, 0]}]
        answer = await client.post("/recommend", json={"user_id": "u", "arms": arms, "k": 2, "explain": True})
        assert answer.status_code == 200, answer.text
        for item in answer.json()["items"]:
            adds_up(item["explanation"])


async def test_explanations_during_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
    with own_valkey() as valkey:
        async with served(valkey.url, tmp_path) as client:
            body = {"user_id": "u", "arms": ARMS, "explain": True}
            assert (await client.post("/recommend", json=body)).json()["logged"]
            valkey.kill()
            answer = (await client.post("/recommend", json=body)).json()
            assert answer["logged"] is False
            adds_up(answer["items"][0]["explanation"])
            group = await client.post("/admin/groups", json={"user_id": "u", "features": [0.5, 1, 2]})
            assert group.status_code == 200
            assert group.json()["users"] is None
            assert group.json()["group_size"] == 1


class TestGroups:
    async def test_groups_of_an_arm_after_rewards(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async with served(valkey_url, tmp_path, nu=50.0) as client, worker_running(valkey_url):
            arm = ARMS[1]
            body = {"user_id": "ann", "features": arm["features"]}
            early = await client.post("/admin/groups", json=body)
            assert (early.status_code, early.json()["type"]) == (404, "/problems/not-found")
            for user, rewards in {"ann": [1, 0], "bob": [0, 1, 1], "cid": [1]}.items():
                await teach(client, user, rewards)
            found = (await client.post("/admin/groups", json=body)).json()
            asked = {"user_id": "ann", "arms": [arm]}
            [item] = (await client.post("/recommend", json=asked)).json()["items"]
            assert found["group_size"] == found["members_total"] == item["group_size"] == len(found["members"])
            assert (found["pool_size"], found["users"], found["sampled"]) == (3, 3, False)
            assert (found["user_version"], found["cold_start"]) == (2, None)
            events = {member["user_id"]: member["events"] for member in found["members"]}
            assert events == {"ann": 2, "bob": 3, "cid": 1}
            assert found["members"][0]["user_id"] == "ann"
            short = (await client.post("/admin/groups", json={**body, "limit": 1})).json()
            assert (len(short["members"]), short["members_total"]) == (1, 3)
            new = (await client.post("/admin/groups", json={**body, "user_id": "never seen"})).json()
            assert (new["cold_start"], new["user_version"], new["pool_size"]) == ("meta", 0, 4)

    async def test_sampled_pool(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async with served(valkey_url, tmp_path, candidate_pool=2) as client, worker_running(valkey_url):
            for user in ("ann", "bob", "cid"):
                await teach(client, user, [1])
            found = (
                await client.post("/admin/groups", json={"user_id": "ann", "features": ARMS[0]["features"]})
            ).json()
            assert (found["users"], found["sampled"]) == (3, True)
            assert found["pool_size"] in (2, 3)  # ann may be in the pool or not

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"features": [1, 2]}, "features"),
            ({"features": {"a": 1}}, "features"),
            ({"features": [1, 2, "3"]}, "features[2]"),
            ({"features": [1, 2, 3e31]}, "features[2]"),
            ({"features": [0.0] * 5_000}, "features"),
            ({"context": [1]}, "context"),
            ({"user_id": ""}, "user_id"),
            ({"user_id": None}, "user_id"),
            ({"limit": 0}, "limit"),
            ({"limit": 1_001}, "limit"),
            ({"limit": True}, "limit"),
            ({"arm_id": "a"}, "arm_id"),
        ],
        ids=str,
    )
    async def test_refusals(
        self, redis: Redis, valkey_url: str, tmp_path: Path, changes: dict[str, Any], field: str
    ) -> None:
        async with served(valkey_url, tmp_path) as client:
            await client.post("/recommend", json={"user_id": "u", "arms": ARMS})
            body = {"user_id": "u", "features": [1, 2, 3], **changes}
            refused = await client.post("/admin/groups", json=body)
            assert refused.status_code == 422
            assert [error["field"] for error in refused.json()["errors"]] == [field]

    async def test_unknown_arm_is_refused(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async with served(valkey_url, tmp_path) as client:
            answers: list[httpx.Response] = [
                await client.get("/admin/groups", params=params)
                for params in ({"user_id": "u", "arm_id": "a"}, {"user_id": "u"}, {"user_id": "u", "arm_id": "a" * 300})
            ]
            assert [each.status_code for each in answers] == [404, 422, 422]

    async def test_get_names_the_call_that_takes_a_context(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async with served(valkey_url, tmp_path) as client:
            await client.post("/recommend", json={"user_id": "u", "arms": ARMS, "context": [1]})
            await client.post("/admin/arms", json=ARMS[0])
            refused = await client.get("/admin/groups", params={"user_id": "u", "arm_id": ARMS[0]["id"]})
            assert refused.status_code == 422
            (error,) = refused.json()["errors"]
            assert error["field"] == "context"
            assert "POST /admin/groups" in error["detail"]
