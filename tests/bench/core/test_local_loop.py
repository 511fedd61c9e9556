"""The loop of the benchmarks keeps the samples that the service keeps."""

from __future__ import annotations

from itertools import count

from redis.asyncio import Redis

from metaban.bench.core.local_loop import LocalLoop, plain_layout
from metaban.models.policies import build_policy
from metaban.service.settings.environment import learner_settings
from tests.service.engine.reward_calls import ARMS, served, users
from tests.service.engine.reward_calls import ask as ask_service
from tests.service.engines import settings, worker_running
from tests.worker.workshop import soon

#: The first epoch is due at fewer events.
EVENTS = 18


async def test_a_late_reward_belongs_to_the_epoch_of_its_decision(redis: Redis, valkey_url: str) -> None:
    asked = count()
    async with worker_running(valkey_url), served(valkey_url, wait_applied_timeout_s=30) as (service, _):

        async def reward(decision_id: str) -> None:
            answer = await service.post("/feedback?wait=applied", json={"decision_id": decision_id, "reward": 1})
            assert answer.json()["applied"], answer.text

        async def has_new_epoch() -> bool:
            return bool((await ask_service(service, f"later-{next(asked)}"))["model_version"])

        late = await ask_service(service, "late")
        for number in range(EVENTS):
            await ask_service(service, f"d{number}")
            await reward(f"d{number}")
        await soon(has_new_epoch, "the first epoch")
        await reward("late")
        of_service = (await (await users(redis)).load_samples(["u"]))["u"][-1]
        assert late["model_version"] == 0

    shipped = settings()
    policy = build_policy(shipped.policy, epsilon=shipped.epsilon, squarecb_gamma=shipped.squarecb_gamma)
    loop = LocalLoop(learner_settings(shipped), policy, inputs=plain_layout(3))
    arms, ids = [arm["features"] for arm in ARMS], [str(arm["id"]) for arm in ARMS]
    waiting = loop.choose("u", arms, "late", arm_ids=ids)
    for number in range(EVENTS):
        loop.learn("u", loop.choose("u", arms, f"d{number}", arm_ids=ids), 1.0)
    assert loop.choose("u", arms, "later", arm_ids=ids).epoch > waiting.epoch
    loop.learn("u", waiting, 1.0)
    of_loop = loop._samples["u"][-1]
    assert of_loop.epoch == of_service.epoch == 0
    assert of_loop.features.tolist() == of_service.features.tolist()
    assert of_loop.phi.tolist() == of_service.phi.tolist()
    assert (of_loop.reward, of_loop.propensity) == (of_service.reward, of_service.propensity)
