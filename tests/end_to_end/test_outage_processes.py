"""The store is killed or stopped: requests are still answered, and the service recovers by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from metaban.bench.worlds.environments import SyntheticGroups
from metaban.service.process.local_deployment import Deployment
from tests.end_to_end.steps import applied_events, eventually, play_over_http, send_reward, valkey_pid
from tests.own_valkey import own_valkey

#: Socket time-out of the service to the store; a request that waited for a store that hangs fails after PATIENCE_S.
SOCKET_TIMEOUT_S = 120
PATIENCE_S = 40.0
CLIENTS = 4


class Probes:
    """Clients that send requests and readiness probes all the time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._world = SyntheticGroups(seed=5)
        self.logged = 0
        self.unlogged: list[str] = []
        self.states: set[tuple[int, str]] = set()
        self.wrong: list[str] = []

    @contextmanager
    def all_the_time(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        threads.append(threading.Thread(target=self._probe))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(30)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                with self._lock:
                    asked = self._world.next_round()
                arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
                try:
                    answer = client.post("/recommend", json={"user_id": asked.user_id, "arms": arms})
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return
                with self._lock:
                    if answer.status_code != 200:
                        self.wrong.append(answer.text)
                    elif answer.json()["logged"]:
                        self.logged += 1
                    else:
                        self.unlogged.append(answer.json()["decision_id"])
                time.sleep(0.005)

    def _probe(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                try:
                    answer = client.get("/health/ready")
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return
                self.states.add((answer.status_code, answer.json()["status"]))
                time.sleep(0.02)

    def is_logged_again(self) -> bool:
        """Whether new decisions are recorded."""
        before = self.logged
        return eventually(lambda: self.logged > before + 10)


def unlogged_by_metric(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("metaban_unlogged_decisions_total{")).split()[1]))


def reward_one(client: httpx.Client, decision: str) -> None:
    """Record a decision and have its reward acknowledged."""
    rows = SyntheticGroups(seed=6).next_round().arms.tolist()
    arms = [{"id": str(place), "features": row} for place, row in enumerate(rows)]
    body = {"user_id": "someone", "arms": arms, "decision_id": decision}
    assert eventually(lambda: client.post("/recommend", json=body).json()["logged"])
    assert eventually(lambda: send_reward(client, decision))


def kill_store(service: Deployment, asking: Probes) -> None:
    """Kill Valkey and wait until the service notices."""
    before = len(asking.unlogged)
    os.kill(valkey_pid(service), signal.SIGKILL)
    assert eventually(lambda: len(asking.unlogged) > before)


def is_ready(client: httpx.Client) -> bool:
    return bool(client.get("/health/ready").json()["status"] == "ready")


def test_a_private_store_that_is_killed_repeatedly(tmp_path: Path) -> None:
    world = SyntheticGroups(seed=3)
    with (
        Deployment(tmp_path, {"METABAN_DURABILITY": "always", "METABAN_LOG_LEVEL": "warning"}) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        accepted = len(play_over_http(client, world, 0, 20))
        asking = Probes(service.url)
        with asking.all_the_time():
            for number in range(5):
                assert asking.is_logged_again()
                reward_one(client, f"kill-{number}")
                accepted += 1
                kill_store(service, asking)
            assert asking.is_logged_again()
        assert asking.wrong == []
        assert asking.states == {(200, "ready"), (200, "degraded")}
        assert eventually(lambda: is_ready(client)), client.get("/health/ready").text
        assert eventually(lambda: applied_events(service) == accepted), (
            f"{applied_events(service)} of {accepted} learned"
        )
        assert unlogged_by_metric(client) == len(asking.unlogged)
        play_over_http(client, world, 1_000, 1_005)


def test_a_store_that_hangs(tmp_path: Path) -> None:
    with own_valkey() as valkey:
        url = f"{valkey.url}?socket_timeout={SOCKET_TIMEOUT_S}"
        settings = {"REDIS_URL": url, "METABAN_LOG_LEVEL": "warning"}
        with Deployment(tmp_path, settings) as service, httpx.Client(base_url=service.url, timeout=60) as client:
            play_over_http(client, SyntheticGroups(seed=3), 0, 20)
            asking = Probes(service.url)
            with asking.all_the_time():
                assert asking.is_logged_again()
                valkey.pause()
                assert eventually(lambda: len(asking.unlogged) > 50)
                refusal = client.post(
                    "/feedback", json={"decision_id": "round-3", "reward": 1.0, "event_id": "again"}, timeout=PATIENCE_S
                )
                assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
                assert client.get("/metrics", timeout=PATIENCE_S).status_code == 200
                valkey.resume()
                assert asking.is_logged_again()
            assert asking.wrong == []
            assert asking.states == {(200, "ready"), (200, "degraded")}
            assert eventually(lambda: is_ready(client)), client.get("/health/ready").text
            assert client.post(
                "/feedback", json={"decision_id": "round-3", "reward": 1.0, "event_id": "again"}
            ).json() == {"accepted": 1, "duplicates": 0, "rejected": []}
            assert client.post("/feedback", json={"decision_id": asking.unlogged[-1], "reward": 1.0}).status_code == 404
            assert unlogged_by_metric(client) == len(asking.unlogged)
            play_over_http(client, SyntheticGroups(seed=4), 1_000, 1_005)
            # It stops although the store hangs.
            valkey.pause()
            assert service.stop() == 0, service.log()


def test_refusing_while_the_store_is_away(tmp_path: Path) -> None:
    with own_valkey() as valkey:
        settings = {"REDIS_URL": valkey.url, "METABAN_STORE_OUTAGE": "refuse"}
        with (
            Deployment(tmp_path, settings) as service,
            httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client,
        ):
            body = {"user_id": "u", "arms": [{"id": "a", "features": [1.0]}, {"id": "b", "features": [2.0]}]}
            assert client.post("/recommend", json=body).json()["logged"] is True
            valkey.kill()
            refusal = client.post("/recommend", json=body)
            assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
            assert refusal.json()["type"] == "/problems/unavailable"
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
            valkey.start()
            assert eventually(lambda: client.get("/health/ready").status_code == 200)
            assert client.post("/recommend", json=body).json()["logged"] is True
