"""The whole loop in real processes: it learns, it survives a restart, and it is what the benchmarks measure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from redis import Redis

from bench.deployment import Deployment
from bench.environments import Round, SyntheticGroups
from bench.harness import LocalLoop, plain_layout
from models.exploration import build_policy
from models.settings import named_settings
from service.settings import Settings, learner_settings

#: Longer than the usual time, below that of the clients here: how soon a busy machine learns is not asked.
PATIENT_WAITS = {"METABAN_WAIT_APPLIED_TIMEOUT_S": "25"}
SEED = 7
ROUNDS = 600
LAST = 100


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    service = Deployment(tmp_path, PATIENT_WAITS)
    with service:
        yield service


@dataclass
class Play:
    """What happened in one round."""

    asked: Round
    arm: int
    reward: float


def play_over_http(client: httpx.Client, world: SyntheticGroups, first: int, last: int) -> list[Play]:
    """Rounds first … last−1; each reward is served before the next question."""
    plays = []
    for number in range(first, last):
        asked = world.next_round()
        arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
        body = {"user_id": asked.user_id, "arms": arms, "decision_id": f"round-{number}"}
        answer = client.post("/recommend", json=body)
        assert answer.status_code == 200, answer.text
        arm = int(answer.json()["items"][0]["arm_id"])
        reward = world.reward(asked, arm)
        told = client.post(
            "/feedback", params={"wait": "applied"}, json={"decision_id": f"round-{number}", "reward": reward}
        )
        assert told.status_code == 202, told.text
        assert told.json() == {"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}
        plays.append(Play(asked, arm, reward))
    return plays


def stored_state(deployment: Deployment) -> dict[bytes, object]:
    """Everything the store holds of users, counts and epochs, byte by byte; who works on it now is another matter."""
    path = next(deployment.data_dir.glob("run/*.sock"))
    with Redis(unix_socket_path=str(path), protocol=2) as redis:
        readers = {b"hash": redis.hgetall, b"list": lambda key: redis.lrange(key, 0, -1), b"string": redis.get}
        return {
            key: readers[kind](key)
            for key in redis.scan_iter("metaban:*")
            if (kind := redis.type(key)) in readers and not key.endswith((b":lease", b":owner"))
        }


def asked_again(client: httpx.Client, world: SyntheticGroups) -> list[dict[str, object]]:
    """The whole slate for everyone: what the served learners think."""
    asked = world.next_round()
    arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
    answers = []
    for user in range(12):
        answer = client.post("/recommend", json={"user_id": f"user-{user}", "arms": arms, "k": len(arms)})
        items = sorted(answer.json()["items"], key=lambda item: item["arm_id"])
        answers += [{"user": user, **{key: item[key] for key in ("mean", "bonus", "group_size")}} for item in items]
    return answers


def test_the_loop_learns_and_survives_a_restart_of_everything(deployment: Deployment) -> None:
    world = SyntheticGroups(seed=SEED)
    with httpx.Client(base_url=deployment.url, timeout=30) as client:
        plays = play_over_http(client, world, 0, ROUNDS // 2)
        thought = asked_again(client, SyntheticGroups(seed=1))
    before = stored_state(deployment)
    versions = {
        user: version for key, value in before.items() if key.endswith(b":versions") for user, version in value.items()
    }
    assert sum(int(version.split(b":")[1]) for version in versions.values()) == ROUNDS // 2

    assert deployment.stop() == 0
    deployment.start()

    after = stored_state(deployment)
    # Decisions carry no learner and expire; everything else is the same, byte by byte.
    assert after == before
    with httpx.Client(base_url=deployment.url, timeout=30) as client:
        for old, new in zip(thought, asked_again(client, SyntheticGroups(seed=1)), strict=True):
            # The order of users in memory differs after a restart, and with it the rounding of sums.
            assert new == pytest.approx(old, rel=1e-4, abs=1e-4)
        plays += play_over_http(client, world, ROUNDS // 2, ROUNDS)

    last = plays[-LAST:]
    random_rate = sum(play.asked.chances.mean() for play in last) / LAST
    rate = sum(play.reward for play in last) / LAST
    # Three standard errors of what a random policy earns in as many rounds: chance alone gets there 1 time in 700.
    margin = 3 * math.sqrt(random_rate * (1 - random_rate) / LAST)
    assert rate > random_rate + margin, f"earned {rate:.3f}, random earns {random_rate:.3f} ± {margin:.3f}"


@pytest.mark.parametrize(
    ("preset", "policy", "rounds"),
    [
        ("default", "ucb-floor", 500),
        ("default", "thompson", 150),
        ("paper", "ucb-floor", 300),
        ("pooled", "ucb-floor", 150),
    ],
)
def test_what_is_benchmarked_is_what_is_served(tmp_path: Path, preset: str, policy: str, rounds: int) -> None:
    with (
        Deployment(tmp_path, {**PATIENT_WAITS, "METABAN_PRESET": preset, "METABAN_POLICY": policy}) as service,
        httpx.Client(base_url=service.url, timeout=30) as client,
    ):
        served = [play.arm for play in play_over_http(client, SyntheticGroups(seed=SEED), 0, rounds)]

    settings = Settings(preset=preset, policy=policy)
    loop = LocalLoop(
        learner_settings(settings),
        build_policy(settings.policy, epsilon=settings.epsilon, squarecb_gamma=settings.squarecb_gamma),
        inputs=plain_layout(4),
    )
    world = SyntheticGroups(seed=SEED)
    measured = []
    for number in range(rounds):
        asked = world.next_round()
        choice = loop.choose(asked.user_id, asked.arms.tolist(), f"round-{number}")
        loop.learn(asked.user_id, choice, world.reward(asked, choice.arm))
        measured.append(choice.arm)
    assert measured == served


def test_a_shared_settings_object_builds_the_shipped_learner() -> None:
    assert learner_settings(Settings()) == named_settings("default")
