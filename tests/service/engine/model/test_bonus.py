"""The setting `bonus`, from the environment to the answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from redis.asyncio import Redis

from metaban.models.learner import Query
from metaban.models.numerics.slates import Slates
from metaban.models.presets import build_learner
from metaban.models.settings import MetaBanSettings, named_settings
from metaban.service.settings.environment import Settings, SettingsError, learner_settings, load_settings
from metaban.store.codec import Sample
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.service.apps import ARMS, PAPER, SMALL, running_app
from tests.service.engines import worker_running
from tests.worker.workshop import CPU, make_sample

REWARDS = (1.0, 0.0, 1.0)


def inputs_of(features: list[float]) -> list[float]:
    """The learner's input of an arm: its features and a constant."""
    return [*features, 1.0]


def expected_bonuses(preset: str, arm: list[float]) -> tuple[list[float], list[float]]:
    """Bonuses of all arms for a user with rewards of one arm: posterior and gradient."""
    found = []
    raw = torch.tensor([inputs_of(list(each["features"])) for each in ARMS])  # type: ignore[call-overload]
    for bonus in ("posterior", "gradient"):
        learner = build_learner(named_settings(preset, width=6, user_steps=2, bonus=bonus), 4)
        shared, pupil = learner.initial_shared(), FitInput("u", len(REWARDS), [sample(arm, r) for r in REWARDS], None)
        [state] = Trainer(learner, CPU).fit(shared, [pupil]).states
        own = {name: torch.from_numpy(value)[None] for name, value in state.items()}
        query = Query(raw, Slates([len(ARMS)]), own, torch.tensor([-1]), torch.tensor([len(REWARDS)]))
        nobody = {name: value[:0] for name, value in own.items()}
        found.append(learner.score(shared, nobody, query).bonus.tolist())
    return found[0], found[1]


def sample(features: list[float], reward: float) -> Sample:
    return replace(make_sample(0), features=np.array(inputs_of(features), dtype=np.float32), reward=reward)


@pytest.mark.parametrize("preset", ["paper", "pooled"])
async def test_posterior_bonus_is_the_deviation_of_the_users_own_learner(
    redis: Redis, valkey_url: str, preset: str
) -> None:
    everything = {"user_id": "u", "arms": ARMS, "k": len(ARMS)}
    async with (
        running_app(valkey_url, **{**PAPER, "preset": preset, "bonus": "posterior"}) as (_, http),
        worker_running(valkey_url),
    ):
        for number, reward in enumerate(REWARDS):
            one = {"user_id": "u", "arms": ARMS[1:2], "decision_id": f"d{number}"}
            assert (await http.post("/recommend", json=one)).status_code == 200
            told = await http.post("/feedback?wait=applied", json={"decision_id": f"d{number}", "reward": reward})
            assert told.json()["applied"] is True
        answer = (await http.post("/recommend", json=everything)).json()
        config = (await http.get("/admin/config")).json()
        refused = await http.patch("/admin/config", json={"bonus": "gradient"})
    bonuses = {item["arm_id"]: item["bonus"] for item in answer["items"]}
    posterior, gradient = expected_bonuses(preset, list(ARMS[1]["features"]))  # type: ignore[call-overload]
    assert [bonuses[str(arm["id"])] for arm in ARMS] == pytest.approx(posterior, rel=1e-4)
    assert posterior != pytest.approx(gradient, rel=1e-2)
    assert "bonus" not in config["settings"], "it is not changed under stored learners"
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "bonus")


async def test_bonus_is_fixed_at_creation(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **PAPER) as (_, http):
        assert (await http.post("/recommend", json={"user_id": "u", "arms": ARMS})).status_code == 200
    async with running_app(valkey_url, **PAPER, bonus="posterior") as (app, _):
        assert app.state.metaban.recommenders.default.live.learner.bonus == "gradient"


def test_bonus_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_PRESET", "paper")
    monkeypatch.setenv("METABAN_BONUS", "posterior")
    built = learner_settings(load_settings())
    assert isinstance(built, MetaBanSettings)
    assert built.bonus == "posterior"
    monkeypatch.setenv("METABAN_BONUS", "variance")
    with pytest.raises(SettingsError, match="METABAN_BONUS: Input should be 'gradient' or 'posterior'"):
        load_settings()


def test_paper_and_pooled_use_the_gradient_by_default() -> None:
    for preset in ("paper", "pooled"):
        built = learner_settings(Settings(preset=preset))
        assert isinstance(built, MetaBanSettings)
        assert built.bonus == "gradient"


def test_default_learner_refuses_the_gradient_bonus() -> None:
    assert learner_settings(Settings(bonus="posterior")) == learner_settings(Settings())
    with pytest.raises(SettingsError, match="METABAN_BONUS: the preset default always uses its posterior"):
        learner_settings(Settings(bonus="gradient"))


def test_namespace_overrides_the_bonus() -> None:
    paper = {**SMALL, **PAPER}
    deployment = Settings(**paper)
    assert learner_settings(deployment, own={"bonus": "posterior"}).to_json()["bonus"] == "posterior"
    gradient = Settings(**{**paper, "bonus": "gradient"})
    other = learner_settings(gradient, preset="default", own={"width": 8})
    assert other == named_settings("default", width=8, samples_kept=20), (
        "what is set for one preset means nothing to another"
    )
