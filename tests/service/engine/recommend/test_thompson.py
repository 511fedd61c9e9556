"""Thompson sampling and calibration over HTTP."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.service.apps import ARMS, PAPER, running_app
from tests.service.engines import worker_running
from tests.worker.workshop import soon

DRAWS = 16
SETTINGS: dict[str, Any] = {
    "policy": "thompson",
    "thompson_draws": DRAWS,
    "thompson_scale": 1.0,
    "seed": 5,
}
ASK = {"user_id": "u", "arms": ARMS}


async def decided(http: httpx.AsyncClient, decision_id: str, **more: object) -> dict[str, Any]:
    answer = await http.post("/recommend", json={**ASK, "decision_id": decision_id, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def draws_won(propensity: float, arms: int) -> float:
    """The number of draws that an arm won, from its propensity."""
    return propensity * (DRAWS + 1) - 1 / arms


async def test_arm_frequencies_match_propensities(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **SETTINGS) as (_, http):
        weights: Counter[str] = Counter()
        squares, seen, count = 0.0, set(), 400
        for number in range(count):
            answer = await decided(http, f"d{number}")
            assert answer["policy"] == "thompson"
            item = answer["items"][0]
            won = draws_won(item["propensity"], 4)
            assert won == pytest.approx(round(won), abs=1e-6), "a whole number of draws"
            weights[item["arm_id"]] += 1 / item["propensity"]
            squares += item["propensity"] ** -2
            seen.add(item["propensity"])
        assert set(weights) == {arm["id"] for arm in ARMS}, "every arm stays in play"
        assert len(seen) > 3, "decisions have draws of their own"
        for arm, weight in weights.items():
            # 1/p of the chosen arm has the mean 1 for each arm, if p is its probability.
            assert weight == pytest.approx(count, abs=4 * squares**0.5), arm


async def test_slate_has_conditional_propensities_and_is_repeatable(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **SETTINGS) as (_, http):
        await http.post("/admin/namespaces", json={"name": "twin", "seed": 5})
        for number in range(20):
            first = await decided(http, f"d{number}", k=4)
            for place, item in enumerate(first["items"]):
                won = draws_won(item["propensity"], 4 - place)
                assert won == pytest.approx(round(won), abs=1e-6)
            assert first["items"][-1]["propensity"] == pytest.approx(1.0), "there is no other arm left"
            assert (await decided(http, f"d{number}", k=4))["items"] == first["items"]
            body = {**ASK, "decision_id": f"d{number}", "k": 4}
            twin = (await http.post("/recommend?namespace=twin", json=body)).json()
            assert twin["items"] == first["items"], "the seed and the id of a decision say all"


async def test_explanations_contain_the_deviation(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **SETTINGS) as (_, http):
        await http.patch("/admin/config", json={"alpha": 0.5})
        [item] = (await decided(http, "d", explain=True))["items"]
        assert item["explanation"]["sigma"] == pytest.approx(2 * item["bonus"], rel=1e-5)
        assert item["bonus"] > 0
        plain = (await decided(http, "d"))["items"][0]
        assert plain["propensity"] == item["propensity"]


async def test_policy_can_change_at_run_time(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **{**SETTINGS, "policy": "ucb"}) as (_, http):
        greedy = await decided(http, "a")
        for number, change in enumerate([{"policy": "thompson"}, {"thompson_draws": 7}, {"thompson_scale": 0.0}]):
            assert (await http.patch("/admin/config", json=change)).status_code == 200
            answer = await decided(http, f"b{number}")
            assert answer["policy"] == "thompson"
        item = answer["items"][0]
        best = item["score"] == pytest.approx(greedy["items"][0]["score"])
        assert item["propensity"] == pytest.approx((7 * best + 1 / 4) / 8), "without a scale scores alone decide"
        assert (await http.patch("/admin/config", json={"thompson_draws": 0})).status_code == 422
        await http.patch("/admin/config", json={"policy": "ucb"})
        assert (await decided(http, "c"))["items"][0]["propensity"] == greedy["items"][0]["propensity"]


async def test_calibration_after_learned_rewards(redis: Redis, valkey_url: str) -> None:
    changes = {**SETTINGS, "learner": {"epoch_events": 8}}
    async with running_app(valkey_url, **changes) as (_, http), worker_running(valkey_url):
        nothing = (await http.get("/admin/calibration")).json()
        assert nothing == {"model_version": 0, "calibration": None}
        assert "metaban_calibration_ece{" not in (await http.get("/metrics")).text
        for number in range(24):
            answer = await decided(http, f"d{number}")
            told = await http.post(
                "/feedback?wait=applied", json={"decision_id": answer["decision_id"], "reward": number % 2}
            )
            assert told.json()["applied"] is True

        async def known() -> bool:
            found = (await http.get("/admin/calibration")).json()["calibration"]
            return found is not None and found["samples"] >= 16

        await soon(known)
        shown = (await http.get("/admin/calibration")).json()
        found = shown["calibration"]
        assert shown["model_version"] > 0
        assert sum(each["samples"] for each in found["bins"]) == found["samples"] <= 24
        for each in found["bins"]:
            assert each["low"] <= each["predicted"] <= each["high"]
            assert 0 <= each["coverage"] <= 1
        gaps = [each["samples"] * abs(each["predicted"] - each["reward"]) for each in found["bins"]]
        assert found["ece"] == pytest.approx(sum(gaps) / found["samples"])
        assert found["mce"] is None, "of 50 samples or more"
        metrics = (await http.get("/metrics")).text
        assert f'metaban_calibration_samples{{namespace="default"}} {found["samples"]}' in metrics
        assert 'metaban_calibration_coverage{namespace="default"}' in metrics
        assert "metaban_calibration_mce{" not in metrics


async def test_paper_has_no_calibration(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **PAPER) as (_, http), worker_running(valkey_url):
        for number in range(20):
            answer = await decided(http, f"d{number}")
            await http.post("/feedback?wait=applied", json={"decision_id": answer["decision_id"], "reward": 1})
        version = answer["model_version"]

        async def advanced() -> bool:
            return bool((await http.get("/admin/calibration")).json()["model_version"] > version) or version > 0

        await soon(advanced)
        assert (await http.get("/admin/calibration")).json()["calibration"] is None
        assert "metaban_calibration_samples{" not in (await http.get("/metrics")).text
