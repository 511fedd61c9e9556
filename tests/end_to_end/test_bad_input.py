"""Bad input to a real service is refused with the field named; nothing is enqueued and memory does not grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from metaban.service.process.local_deployment import Deployment

pytestmark = pytest.mark.slow

REQUESTS = 1_000
GROWTH_LIMIT_BYTES = 20 * 2**20

ARMS = [{"id": "a", "features": [1.0, 0.0]}, {"id": "b", "features": [0.0, 1.0]}]
BIG = b'{"user_id": "u", "arms": [{"id": "a", "features": [' + b"1," * 5_000_000 + b"1]}]}"


def recommend(**changes: object) -> bytes:
    return json.dumps({"user_id": "u", "arms": ARMS, **changes}).encode()


def feedback(**changes: object) -> bytes:
    return json.dumps({"decision_id": "known", "reward": 1.0, **changes}).encode()


#: path, body, status, and the field that the answer must name (None: the answer is about the whole body)
CASES: list[tuple[str, bytes, int, str | None]] = [
    ("/recommend", recommend(arms=[{"id": "a", "features": [1.0, 0.0, 0.0]}]), 422, "arms[0].features"),
    ("/recommend", recommend(arms=[ARMS[0], {"id": "b", "features": [1.0]}]), 422, "arms[1].features"),
    ("/recommend", recommend(arms=[ARMS[0], {"id": "b", "features": [1.0, float("nan")]}]), 422, "arms[1].features[1]"),
    ("/recommend", recommend().replace(b"1.0", b"1e999", 1), 422, "arms[0].features[0]"),
    ("/recommend", recommend().replace(b"1.0", b"-1e999", 1), 422, "arms[0].features[0]"),
    ("/recommend", recommend(arms=[]), 422, "arms"),
    ("/recommend", recommend(arms=[ARMS[0], ARMS[0]]), 422, "arms[1].id"),
    ("/recommend", recommend(arms="a"), 422, "arms"),
    ("/recommend", recommend(user_id=7), 422, "user_id"),
    ("/recommend", recommend(k=3), 422, "k"),
    ("/recommend", recommend(context=[1.0]), 422, "context"),
    ("/recommend", BIG, 413, None),
    ("/feedback", feedback(decision_id="never-made"), 404, "decision_id"),
    ("/feedback", feedback(reward=1.5), 422, "reward"),
    ("/feedback", feedback(reward=-0.1), 422, "reward"),
    ("/feedback", feedback(reward="1"), 422, "reward"),
    ("/feedback", feedback().replace(b"1.0", b"NaN"), 422, "reward"),
    ("/feedback", feedback().replace(b"1.0", b"1e999"), 422, "reward"),
    ("/feedback", feedback().replace(b"1.0", b"-1e999"), 422, "reward"),
    ("/feedback", feedback(arm_id="not-chosen"), 422, "arm_id"),
    ("/feedback", feedback(surprise=1), 422, "surprise"),
    ("/feedback", BIG, 413, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("bad")) as deployment:
        body = recommend(decision_id="known")
        answer = httpx.post(f"{deployment.url}/recommend", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200
        yield deployment


@pytest.fixture
def client(service: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60, headers={"Content-Type": "application/json"}) as client:
        yield client


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1_024 for line in status.splitlines() if line.startswith("VmRSS"))


def stored_events(service: Deployment) -> tuple[int, int]:
    """Number of events ever enqueued, and of entries in the streams."""
    with Redis(unix_socket_path=str(next(service.data_dir.glob("run/*.sock"))), protocol=2) as redis:
        counters = [redis.hget(key, "enqueued") for key in redis.scan_iter("metaban:*:counters")]
        return sum(int(count or 0) for count in counters), sum(map(redis.xlen, redis.scan_iter("metaban:*:events")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc, which is Linux")
def test_a_thousand_bad_requests_leave_nothing_behind(client: httpx.Client, service: Deployment) -> None:
    for path, body, status, field in CASES:  # what the first requests allocate once is not growth
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert field is None or field in [error["field"] for error in answer.json()["errors"]]
    pid = service.process.pid
    before = resident_bytes(pid)
    for number in range(REQUESTS):
        path, body, status, _ = CASES[number % len(CASES)]
        assert client.post(path, content=body).status_code == status
    assert resident_bytes(pid) - before < GROWTH_LIMIT_BYTES
    assert stored_events(service) == (0, 0)
