"""The settings of one namespace as they are now: the deployment's, and what the namespace overrides.

What is overridden is part of the namespace's record, so that every process that serves it, and every worker, comes to
the same; a process looks for a changed record once a second, and the one that was asked for the change has it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from pydantic import ValidationError

from models.exploration import Policy, build_policy
from service.learner_checks import stored_learner
from service.settings import LEARNER_SETTINGS, Settings, SettingsError, learner_settings, reward_rules, told
from store.namespaces import NamespaceRecord
from store.reward_rules import RewardRules

#: What may be changed while a namespace is served.
LIVE: Final = (
    "alpha", "nu", "gamma", "policy", "epsilon", "squarecb_gamma", "thompson_draws", "thompson_scale",
    "serving", "baseline", "reward_min", "reward_max", "repeated_rewards", "default_reward", "reward_wait_s", "fusion",
)  # fmt: skip
#: Settings of the learner, which differ from preset to preset.
OF_PRESET: Final = ("learner", *LEARNER_SETTINGS)
#: What else a namespace may have of its own, from its creation on.
OWN: Final = (
    "preset", *(name for name in OF_PRESET if name not in LIVE),
    "hash_dimension", "context_products", "intercept", "partitions", "seed",
)  # fmt: skip


def overridden(deployment: Settings, name: str, overrides: Mapping[str, Any]) -> Settings:
    """The settings of a namespace; SettingsError when they cannot be used."""
    unknown = sorted(set(overrides) - {*LIVE, *OWN})
    if unknown:
        raise SettingsError(f"a namespace has no settings {', '.join(unknown)} of its own")
    # All values are given, so that nothing is read from the environment again.
    values = {field: getattr(deployment, field) for field in Settings.model_fields}
    if overrides.get("preset", deployment.preset) != deployment.preset:
        values |= _defaults()
    values |= {**overrides, "namespace": name}
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError(told(error)) from None
    learner_settings(settings)
    reward_rules(settings)
    return settings


def kept(deployment: Settings, record: NamespaceRecord) -> Settings:
    """The deployment's settings as a namespace goes by them that has a life of its own; SettingsError when it cannot.

    What its learners are made of stays as it was when it was made, whatever becomes of the deployment's.
    """
    made = stored_learner(record)
    # What the namespace says by itself is not said twice.
    own = record.overrides.get("learner", {})
    structure = {name: value for name, value in made.structure().items() if name not in own}
    structure |= {"preset": made.preset, "seed": record.seed}
    values: dict[str, Any] = {"namespace": record.name, "partitions": record.partitions}
    if made.preset != deployment.preset:
        values |= _defaults()
    values |= {name: value for name, value in structure.items() if name in Settings.model_fields}
    more = {**values.get("learner", deployment.learner), **structure}
    values["learner"] = {name: value for name, value in more.items() if name not in Settings.model_fields}
    return deployment.model_copy(update=values)


def _defaults() -> dict[str, Any]:
    """What the deployment sets for its own learner means nothing to another."""
    return {field: Settings.model_fields[field].get_default(call_default_factory=True) for field in OF_PRESET}


@final
class LiveSettings:
    """The record of a served namespace, and what follows from it."""

    record: NamespaceRecord
    settings: Settings
    policy: Policy
    rules: RewardRules

    def __init__(self, deployment: Settings, record: NamespaceRecord) -> None:
        self._deployment = deployment
        self.adopt(record)

    def adopt(self, record: NamespaceRecord) -> None:
        """Go by a record from now on."""
        settings = overridden(self._deployment, record.name, record.overrides)
        self.policy = build_policy(
            settings.policy,
            epsilon=settings.epsilon,
            squarecb_gamma=settings.squarecb_gamma,
            thompson_draws=settings.thompson_draws,
            thompson_scale=settings.thompson_scale,
        )
        self.rules = reward_rules(settings)
        self.record, self.settings = record, settings

    def proposed(self, patch: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
        """What would be overridden with a patch, in which None takes an override away, and the settings then."""
        merged = {**self.record.overrides, **patch}
        overrides = {name: value for name, value in merged.items() if value is not None}
        return overrides, overridden(self._deployment, self.record.name, overrides)
