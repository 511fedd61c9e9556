"""Warm starts in real processes: trained on users with profiles, the first decision of a new user is right far more
often than by chance."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from metaban.service.process.local_deployment import Deployment
from tests.own_valkey import own_valkey

SOURCES, NEW, ARMS, ROUNDS = 72, 40, 4, 4
#: No random exploration, so that first decisions show what was learned.
ENVIRONMENT = {"METABAN_PARTITIONS": "4", "METABAN_EPSILON": "0"}
#: Chance alone is this lucky less than once in a million runs.
LUCK = 1e-6
TRAINED_WITHIN_S = 120.0
#: A worker whose training is as short as these few sources allow; everything else is as in `metaban worker`.
WORKER = """
import sys
from metaban.service.settings.environment import Settings
from metaban.worker.namespace import WorkerSettings
from metaban.worker.process import run_worker
said = Settings()
limits = said.backlog_limit, said.samples_kept, said.candidate_pool
run_worker(sys.argv[1], WorkerSettings(*limits, fusion_rounds=4))
"""


class World:
    """Users like a direction, which their profile contains besides irrelevant numbers; arms are directions too, and the
    best arm is the nearest. Averaged over users, all arms are equal."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def user(self) -> tuple[float, list[float]]:
        """A direction and the profile of a user who likes it."""
        liked = self._generator.uniform(-math.pi, math.pi)
        return liked, [math.cos(liked), math.sin(liked), float(self._generator.normal())]

    def offer(self) -> list[float]:
        """Directions of arms: one in each quadrant, rotated together."""
        turned = self._generator.uniform(-math.pi, math.pi)
        return [turned + place * math.pi / 2 for place in self._generator.permutation(ARMS)]

    def reward(self, liked: float, arm: float) -> float:
        noise = 0.05 * self._generator.normal()
        return float(np.clip(0.5 + 0.4 * math.cos(liked - arm) + noise, 0, 1))


def ask(user: str, offer: list[float], profile: list[float] | None, k: int = 1) -> dict[str, Any]:
    arms = [{"id": str(place), "features": [math.cos(arm), math.sin(arm)]} for place, arm in enumerate(offer)]
    return {"user_id": user, "arms": arms, "k": k} | ({} if profile is None else {"user_features": profile})


def decide(client: httpx.Client, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send many requests; returns the decisions."""
    found = []
    for start in range(0, len(requests), 100):
        answer = client.post("/recommend/batch", json={"requests": requests[start : start + 100]})
        assert answer.status_code == 200, answer.text
        found += answer.json()["results"]
    assert {each["status"] for each in found} == {200}, found[0]
    return [each["decision"] for each in found]


def send_rewards(client: httpx.Client, world: World) -> None:
    """Send rewards of the sources for all arms of some slates."""
    people = [world.user() for _ in range(SOURCES)]
    for _ in range(ROUNDS):
        offers = [world.offer() for _ in people]
        asked = [ask(f"source {n}", offers[n], profile, ARMS) for n, (_, profile) in enumerate(people)]
        decisions = decide(client, asked)
        events = [
            {"decision_id": decision["decision_id"], "arm_id": str(place), "reward": world.reward(liked, arm)}
            for decision, offer, (liked, _) in zip(decisions, offers, people, strict=True)
            for place, arm in enumerate(offer)
        ]
        told = client.post("/feedback", params={"wait": "applied"}, json={"events": events}).json()
        assert (told["accepted"], told["applied"]) == (len(events), True)


def train(client: httpx.Client) -> dict[str, Any]:
    """Request fusion and wait until it is served; its progress never decreases."""
    asked = client.post("/admin/fusion")
    assert asked.status_code == 202, asked.text
    end, progress = time.monotonic() + TRAINED_WITHIN_S, 0.0
    while True:
        shown: dict[str, Any] = client.get("/admin/fusion").json()
        job = shown["job"]
        assert job["state"] in {"queued", "running", "done"}, job
        assert job["progress"] >= progress or job["state"] != "running"
        progress = job["progress"]
        if job["state"] == "done" and shown["served"] == shown["version"] is not None:
            return shown
        assert time.monotonic() < end, shown
        time.sleep(0.1)


def chance_probability(right: int, of: int, chance: float) -> float:
    """Probability of at least this many successes by chance."""
    return sum(math.comb(of, n) * chance**n * (1 - chance) ** (of - n) for n in range(right, of + 1))


@contextmanager
def deployed(data_dir: Path) -> Iterator[httpx.Client]:
    """A client of a service with a worker."""
    with own_valkey() as valkey:
        worker = subprocess.Popen([sys.executable, "-P", "-c", WORKER, valkey.url])
        try:
            with (
                Deployment(data_dir, {**ENVIRONMENT, "REDIS_URL": valkey.url}, "--no-worker") as service,
                httpx.Client(base_url=service.url, timeout=60) as client,
            ):
                yield client
        finally:
            worker.terminate()
            assert worker.wait(30) == 0


@pytest.mark.slow
def test_first_decisions_of_new_users_are_better_than_chance(tmp_path: Path) -> None:
    world = World(seed=5)
    with deployed(tmp_path) as client:
        assert client.get("/admin/fusion").json()["version"] is None
        send_rewards(client, world)
        shown = train(client)
        if shown["sources"] < SOURCES:
            # The worker may have started by itself when enough sources were there, but not all of them.
            assert shown["job"]["by"] == "growth"
            shown = train(client)
        assert (shown["sources"], shown["profile_size"]) == (SOURCES, 3)
        assert shown["guard"]["verdict"] in {"fusion", "blend"}, shown["guard"]

        people, offers = [world.user() for _ in range(NEW)], [world.offer() for _ in range(NEW)]
        asked = [ask(f"new {n}", offers[n], profile) for n, (_, profile) in enumerate(people)]
        first = decide(client, asked)
        assert {(each["cold_start"], each["user_version"]) for each in first} == {("fusion", 0)}
        right = 0
        for decision, offer, (liked, _) in zip(first, offers, people, strict=True):
            best = max(range(ARMS), key=lambda place: math.cos(liked - offer[place]))
            right += int(decision["items"][0]["arm_id"]) == best
        assert chance_probability(right, NEW, 1 / ARMS) < LUCK, f"{right} of {NEW} right"

        without = decide(client, [ask(f"stranger {n}", offers[n], None) for n in range(NEW)])
        assert {each["cold_start"] for each in without} == {"meta"}
        # Later decisions keep the warm start, also without a profile in the request.
        again = decide(client, [ask(f"new {n}", offers[n], None) for n in range(NEW)])
        assert {each["cold_start"] for each in again} == {"fusion"}
        assert [each["items"][0]["arm_id"] for each in again] == [each["items"][0]["arm_id"] for each in first]

        user = client.get("/admin/users/new 0").json()
        assert (user["cold_start"], user["warm_start"]["fusion_version"]) == ("fusion", shown["version"])
        nearest = user["warm_start"]["nearest"]
        assert len(nearest) == 5
        assert all(each["user_id"].startswith("source ") for each in nearest)
        assert client.get("/admin/users/stranger 0").json()["warm_start"] is None

        refused = client.post("/recommend", json=ask("another", offers[0], [1.0, 2.0]))
        assert refused.status_code == 422
        assert [error["field"] for error in refused.json()["errors"]] == ["user_features"]
