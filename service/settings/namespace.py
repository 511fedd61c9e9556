"""The settings of a namespace.

Its record holds what shapes learning (learner settings and reward rules), written at creation from the environment of
the process that created it and changed by PATCH /admin/config. A process whose environment differs follows the record
(`differences`). How arms are chosen from what was learned comes from the environment of each process, unless the record
overrides it. A process checks for a changed record every second; the one that made the change uses it at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

import structlog
from pydantic import JsonValue, ValidationError

from metaban.models.features import FeatureLayout
from metaban.models.policies import Policy, build_policy
from metaban.models.presets import build_learner
from metaban.models.settings import LearnerSettings, stored_settings
from metaban.service.settings.environment import (
    OF_EVERY_PRESET,
    OFF,
    REWARD_SETTINGS,
    Settings,
    SettingsError,
    check_retention,
    describe_errors,
    learner_settings,
    reward_rules,
    shown_rules,
    variable_of,
)
from metaban.store.client.connection import connect
from metaban.store.errors import CorruptRecord, NamespaceConflict
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.processes import SUPERVISED_VARIABLE
from metaban.store.reward_rules import RewardRules

#: Learner settings that can change at run time.
LIVE_LEARNER: Final = ("alpha", "nu", "gamma", "samples_kept", "candidate_pool")

#: Settings of a namespace that can change at run time.
LIVE: Final = (
    *LIVE_LEARNER, "policy", "epsilon", "squarecb_gamma", "thompson_draws", "thompson_scale", "serving", "baseline",
    *REWARD_SETTINGS, "fusion", "user_retention_days",
)  # fmt: skip

#: Further settings that a namespace may override; they are fixed at its creation.
AT_CREATION: Final = ("preset", "learner", "hash_dimension", "context_products", "intercept", "partitions", "seed")

#: Overridable settings whose value is in other fields of the record.
IN_RECORD: Final = frozenset({*LIVE_LEARNER, *REWARD_SETTINGS, "preset", "learner", "partitions", "seed"})

log = structlog.get_logger()


@final
class LiveSettings:
    """The record of a served namespace, and the settings, policy, learner settings and reward rules that follow."""

    record: NamespaceRecord
    settings: Settings
    policy: Policy
    learner: LearnerSettings
    rules: RewardRules

    def __init__(self, deployment: Settings, record: NamespaceRecord) -> None:
        self._deployment = deployment
        self.adopt(record)

    def adopt(self, record: NamespaceRecord) -> None:
        """Use the settings of a record from now on."""
        settings, learner = overridden(self._deployment, record.name, record.overrides), stored_learner(record)
        self.policy = build_policy(
            settings.policy,
            epsilon=settings.epsilon,
            squarecb_gamma=settings.squarecb_gamma,
            thompson_draws=settings.thompson_draws,
            thompson_scale=settings.thompson_scale,
        )
        self.learner, self.rules = learner, record.reward_rules
        self.record, self.settings = record, settings

    def values(self) -> dict[str, JsonValue]:
        """The settings that can change at run time; None where the learner has no such setting."""
        values = {name: getattr(self.settings, name) for name in LIVE}
        values |= {name: self.record.learner.get(name) for name in LIVE_LEARNER}
        return {**values, **shown_rules(self.rules), "baseline": list(self.settings.baseline)}

    def proposed(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the record after a patch, in which None resets a setting to the value of the deployment.

        A setting that has the value already stays: what `values` returns can be sent back.
        """
        record = self.record
        overrides = {name: value for name, value in {**record.overrides, **patch}.items() if value is not None}
        served, rewards = overridden(self._deployment, record.name, overrides), self._proposed_rewards(patch)
        check_retention(served.user_retention_days, rewards["window_s"] + served.late_window_s)
        created, learner = created_learner(self._deployment, record).to_json(), dict(record.learner)
        for name in LIVE_LEARNER:
            if name in patch and name in learner:
                learner[name] = created[name] if patch[name] is None else patch[name]
            elif patch.get(name) is not None:
                raise SettingsError(f"{variable_of(name)}: the preset {learner['preset']} has no such setting")
        try:
            learner = stored_settings(learner).to_json()
        except ValueError as error:
            raise SettingsError(f"{variable_of(str(error).partition(' ')[0])}: {error}") from None
        return {"overrides": overrides, "learner": learner, "rewards": rewards}

    def _proposed_rewards(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        default, rewards = reward_rules(self._deployment).to_json(), self.rules.to_json()
        shown, sent = shown_rules(self.rules), [name for name in REWARD_SETTINGS if name in patch]
        for name in sent:
            if patch[name] != shown[name]:
                field, off = REWARD_SETTINGS[name], patch[name] == OFF
                rewards[field] = default[field] if patch[name] is None else None if off else patch[name]
        try:
            return RewardRules(**rewards).to_json()
        except ValueError as error:
            raise SettingsError(f"{', '.join(map(variable_of, sent))}: {error}") from None


def overridden(deployment: Settings, name: str, overrides: Mapping[str, Any]) -> Settings:
    """The settings that a namespace with these overrides is served with; SettingsError when they are invalid.

    They do not include what the record holds in other fields.
    """
    unknown = sorted(set(overrides) - {*LIVE, *AT_CREATION})
    if unknown:
        raise SettingsError(f"a namespace cannot override {', '.join(unknown)}")
    # All values are passed, so that nothing is read from the environment again.
    values = {field: getattr(deployment, field) for field in Settings.model_fields}
    values |= {field: value for field, value in overrides.items() if field not in IN_RECORD}
    try:
        return Settings(**{**values, "namespace": name})
    except ValidationError as error:
        raise SettingsError(describe_errors(error)) from None


def created_learner(deployment: Settings, record: NamespaceRecord) -> LearnerSettings:
    """The learner settings that the namespace would have if it were created now."""
    preset = str(record.learner["preset"])
    return learner_settings(deployment, preset=preset, own=record.overrides.get("learner"))


async def complete(namespaces: NamespaceStore, record: NamespaceRecord, deployment: Settings) -> NamespaceRecord:
    """Fill in from the environment what the record of an older version lacks."""
    learner = {name: getattr(deployment, name) for name in OF_EVERY_PRESET}
    rewards = reward_rules(deployment)
    if "default_reward" not in deployment.model_fields_set:
        rewards = replace(rewards, default_reward=None)  # a namespace of a version that had none learns as before
    return await namespaces.fill(record, learner=learner, rewards=rewards)


async def replace_invalid_learner(
    namespaces: NamespaceStore, record: NamespaceRecord, wanted: LearnerSettings
) -> NamespaceRecord:
    """Replace learner settings that this version does not allow, if the learned state does not depend on them."""
    try:
        stored_learner(record)
    except SettingsError:
        same = all(record.learner.get(name) == value for name, value in wanted.structure().items())
        if record.layout is not None and not same:
            raise
    else:
        return record
    try:
        return await namespaces.replace_learner(record, wanted.to_json())
    except NamespaceConflict:
        # Another process that starts at the same time was first.
        current = await namespaces.load(record.name)
        if current is None or current.revision == record.revision:
            raise
        return await replace_invalid_learner(namespaces, current, wanted)


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """A variable of the environment that a namespace does not follow."""

    variable: str
    record: JsonValue
    environment: JsonValue


def differences(deployment: Settings, record: NamespaceRecord) -> Iterator[Difference]:
    """Variables that are set to another value than the record holds, except those that an admin overrode."""
    given = deployment.model_fields_set - record.overrides.keys()
    wanted: dict[str, JsonValue] = {"preset": deployment.preset}
    if record.learner.get("preset") == deployment.preset:
        wanted = learner_settings(deployment).to_json()
    own = record.overrides.get("learner", {})
    for name, value in wanted.items():
        recorded = record.learner.get(name)
        if name in own or recorded in (None, value):
            continue
        if name in given:
            yield Difference(variable_of(name), recorded, value)
        elif "learner" in given and name in deployment.learner:
            yield Difference(f"{variable_of('learner')} ({name})", recorded, value)
    recorded_rules, wanted_rules = shown_rules(record.reward_rules), shown_rules(reward_rules(deployment))
    for name, field in REWARD_SETTINGS.items():
        if name in given and field in (record.rewards or {}) and recorded_rules[name] != wanted_rules[name]:
            yield Difference(variable_of(name), recorded_rules[name], wanted_rules[name])


async def all_differences(deployment: Settings, redis_url: str) -> list[tuple[str, Difference]]:
    """The differences of all namespaces of a store, with their names."""
    redis = connect(redis_url)
    try:
        namespaces, found = NamespaceStore(redis), []
        for name in await namespaces.names():
            with suppress(CorruptRecord, ValueError):  # the service logs a damaged record, or an invalid name
                record = await namespaces.load(name)
                if record is not None and record.state == "ready":
                    found += [(name, each) for each in differences(deployment, record)]
        return found
    finally:
        await redis.aclose()


def warn_of_differences(deployment: Settings, redis_url: str) -> None:
    """Log the differences of all namespaces. The worker of `metaban serve` does not: the service logs them."""
    if SUPERVISED_VARIABLE not in os.environ:
        for name, difference in asyncio.run(all_differences(deployment, redis_url)):
            log_difference(log.bind(namespace=name), difference)


def log_difference(bound: structlog.typing.FilteringBoundLogger, difference: Difference) -> None:
    """Tell that a variable has no effect on a namespace."""
    effect = "the record is followed; PATCH /admin/config changes it"
    bound.warning("settings_differ", **asdict(difference), effect=effect)


def check_size(learner: LearnerSettings, layout: dict[str, Any] | None, *, blamed: str = "METABAN_LEARNER") -> None:
    """SettingsError when the learner would be too large: with the inputs of the layout, or with any if it is None."""
    try:
        build_learner(learner, 1)  # first: if this fails, the layout is not the cause
        if layout is not None:
            build_learner(learner, FeatureLayout.from_json(layout).parts)
    except ValueError as error:
        raise SettingsError(f"{blamed}: {error}") from error


def stored_learner(record: NamespaceRecord) -> LearnerSettings:
    """The learner's settings of a namespace; SettingsError when this version does not allow them."""
    try:
        return stored_settings(record.learner)
    except ValueError as error:
        raise SettingsError(
            f"namespace {record.name} was stored with learner settings that this version does not allow: {error}"
        ) from error
