"""METABAN_DURABILITY=replicated over HTTP: a 202 survives the loss of the primary; a 503 promises nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from metaban.service.process.local_deployment import Deployment
from metaban.store.keys import NamespaceKeys
from tests.valkeys import DURABLE, Valkey, running_pair

pytestmark = pytest.mark.slow

PARTITIONS = 4
ARMS = [{"id": "a", "features": [1.0, 0.0]}, {"id": "b", "features": [0.0, 1.0]}]


@pytest.fixture(params=["memory", "disk"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Valkey, Valkey]]:
    with running_pair(tmp_path / "servers", *(DURABLE if request.param == "disk" else ())) as servers:
        yield servers


@pytest.fixture
def service(tmp_path: Path, pair: tuple[Valkey, Valkey]) -> Iterator[Deployment]:
    """A service without a worker, so that enqueued events stay in the streams."""
    environment = {
        "REDIS_URL": pair[0].url,
        "METABAN_DURABILITY": "replicated",
        "METABAN_REPLICA_WAIT_MS": "400",
        "METABAN_PARTITIONS": str(PARTITIONS),
    }
    with Deployment(tmp_path, environment, "--no-worker") as deployment:
        yield deployment


def decide(client: httpx.Client, count: int) -> list[str]:
    decisions = [f"decision-{number}" for number in range(count)]
    for number, decision in enumerate(decisions):
        body = {"user_id": f"user-{number}", "arms": ARMS, "decision_id": decision}
        assert client.post("/recommend", json=body).status_code == 200
    return decisions


def send_reward(client: httpx.Client, decision: str) -> httpx.Response:
    return client.post("/feedback", json={"decision_id": decision, "reward": 1.0})


def test_acknowledged_events_survive_the_loss_of_the_primary(service: Deployment, pair: tuple[Valkey, Valkey]) -> None:
    primary, replica = pair
    acknowledged: list[str] = []
    with httpx.Client(base_url=service.url, timeout=60) as client:
        decisions = decide(client, 300)
        answer = send_reward(client, decisions[0])
        assert (answer.status_code, answer.json()["accepted"]) == (202, 1)

        replica.pause()
        for _ in range(2):  # the second time as a duplicate, which waits for the replica as well
            refused = send_reward(client, decisions[1])
            assert refused.status_code == 503, refused.text
            assert refused.headers["Retry-After"]
            assert "replicas" in refused.json()["detail"]
        assert client.get("/health/ready").status_code == 200
        assert client.post("/recommend", json={"user_id": "u", "arms": ARMS}).status_code == 200
        replica.resume()
        answer = send_reward(client, decisions[1])
        assert (answer.status_code, answer.json()["duplicates"]) == (202, 1)
        acknowledged += decisions[:2]

        # Several at a time, so that some are between script and answer when the primary dies.
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(send_reward, client, decision) for decision in decisions[2:]]
            answers[100].result()
            primary.kill()
        codes = [answer.result().status_code for answer in answers]
        assert set(codes) == {202, 503}
        acknowledged += [decision for decision, code in zip(decisions[2:], codes, strict=True) if code == 202]
    replica.ask("REPLICAOF", "NO", "ONE")
    keys = NamespaceKeys("default", PARTITIONS)
    found = set()
    for partition in range(PARTITIONS):
        rows = replica.ask("XRANGE", keys.events(partition), "-", "+")
        assert isinstance(rows, list)
        found |= {dict(zip(flat[::2], flat[1::2], strict=True))[b"d"].decode() for _, flat in rows}
    assert set(acknowledged) <= found
