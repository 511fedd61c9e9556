"""The whole loop in real processes: it learns, survives a restart, and equals what the benchmarks measure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from metaban.bench.core.local_loop import LocalLoop, plain_layout
from metaban.bench.worlds.environments import SyntheticGroups
from metaban.models.policies import build_policy
from metaban.models.settings import named_settings
from metaban.service.process.local_deployment import Deployment
from metaban.service.settings.environment import Settings, learner_settings
from tests.end_to_end.steps import epoch_served, play_over_http, scores_for_all_users

SEED = 7
ROUNDS = 600
LAST = 100

#: The last event before the restart that makes an epoch due.
LAST_EPOCH = 256


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    service = Deployment(tmp_path)
    with service:
        yield service


def stored_state(deployment: Deployment) -> dict[bytes, object]:
    """All stored users, counters and epochs as bytes, without leases."""
    path = next(deployment.data_dir.glob("run/*.sock"))
    with Redis(unix_socket_path=str(path), protocol=2) as redis:
        readers = {b"hash": redis.hgetall, b"list": lambda key: redis.lrange(key, 0, -1), b"string": redis.get}
        return {
            key: readers[kind](key)
            for key in redis.scan_iter("metaban:*")
            if (kind := redis.type(key)) in readers and not key.endswith((b":lease", b":owners"))
        }


def test_the_loop_learns_and_survives_a_restart_of_everything(deployment: Deployment) -> None:
    world = SyntheticGroups(seed=SEED)
    with httpx.Client(base_url=deployment.url, timeout=60) as client:
        plays = play_over_http(client, world, 0, LAST_EPOCH)
        assert epoch_served(deployment, LAST_EPOCH)
        plays += play_over_http(client, world, LAST_EPOCH, ROUNDS // 2)
        thought = scores_for_all_users(client, SyntheticGroups(seed=1))
    before = stored_state(deployment)
    versions = {
        user: version for key, value in before.items() if key.endswith(b":versions") for user, version in value.items()
    }
    assert sum(int(version.split(b":")[1]) for version in versions.values()) == ROUNDS // 2

    assert deployment.stop() == 0
    deployment.start()

    after = stored_state(deployment)
    # Byte by byte.
    assert after == before
    with httpx.Client(base_url=deployment.url, timeout=60) as client:
        for old, new in zip(thought, scores_for_all_users(client, SyntheticGroups(seed=1)), strict=True):
            # The order of users in memory differs after a restart, and with it the rounding of sums.
            assert new == pytest.approx(old, rel=1e-4, abs=1e-4)
        plays += play_over_http(client, world, ROUNDS // 2, ROUNDS)

    last = plays[-LAST:]
    random_rate = sum(play.asked.chances.mean() for play in last) / LAST
    rate = sum(play.reward for play in last) / LAST
    # Three standard errors of the earnings of a random policy: chance alone gets there once in 700 runs.
    margin = 3 * math.sqrt(random_rate * (1 - random_rate) / LAST)
    assert rate > random_rate + margin, f"earned {rate:.3f}, random earns {random_rate:.3f} ± {margin:.3f}"


@pytest.mark.parametrize(
    ("preset", "policy", "rounds"),
    [
        ("default", "ucb-floor", 270),
        ("default", "thompson", 150),
        ("paper", "ucb-floor", 140),
        ("pooled", "ucb-floor", 70),
    ],
)
@pytest.mark.slow
def test_the_benchmarked_loop_equals_the_service(tmp_path: Path, preset: str, policy: str, rounds: int) -> None:
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
        ids = [str(place) for place in range(len(asked.arms))]
        choice = loop.choose(asked.user_id, asked.arms.tolist(), f"round-{number}", arm_ids=ids)
        loop.learn(asked.user_id, choice, world.reward(asked, choice.arm))
        measured.append(choice)
    epochs = [choice.epoch for choice in measured]
    assert epochs[-1] > 1

    with (
        Deployment(tmp_path, {"METABAN_PRESET": preset, "METABAN_POLICY": policy}) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        served = play_over_http(client, SyntheticGroups(seed=SEED), 0, rounds, epochs=epochs)
    assert [choice.arm for choice in measured] == [play.arm for play in served]


def test_a_shared_settings_object_builds_the_shipped_learner() -> None:
    assert learner_settings(Settings()) == named_settings("default")
