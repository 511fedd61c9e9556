"""What is asked of the service, and what it answers, as an application sees it.

`service.client_admin_types` has what administrators are answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final
from uuid import uuid4

from service.client_errors import ApiError, MetabanError, Unsendable

#: A list of numbers, or named numbers, strings and booleans: the same kind for all arms of a namespace.
Features: TypeAlias = Sequence[float] | Mapping[str, float | str | bool]
JsonObject: TypeAlias = dict[str, Any]


def features_json(features: Features) -> list[float] | JsonObject:
    """Features as JSON has them; arrays of numbers will do as well."""
    if isinstance(features, Mapping):
        return dict(features)
    try:
        return [float(number) for number in features]
    except (TypeError, ValueError):
        raise Unsendable("features are a list of numbers, or named numbers, strings and booleans") from None


def arm_json(arm_id: str, features: Features) -> JsonObject:
    """An arm as JSON has it."""
    return {"id": arm_id, "features": features_json(features)}


# What is asked


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """Which arms for this user? As `Metaban.recommend` takes it, to be sent in a batch."""

    user_id: str
    #: Features by id of the arms there are; left out: the catalogue.
    arms: Mapping[str, Features] | None = None
    arm_ids: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    k: int = 1
    context: Features | None = None
    user_features: Features | None = None
    #: One is made up here, not by the service: the same question may then be sent again.
    decision_id: str = field(default_factory=lambda: uuid4().hex)
    explain: bool = False
    min_version: int | None = None
    deferred: bool = False

    def json(self) -> JsonObject:
        """The body; what has its default is left out."""
        body: JsonObject = {"user_id": self.user_id, "decision_id": self.decision_id}
        if self.arms is not None:
            body["arms"] = [arm_json(arm_id, features) for arm_id, features in self.arms.items()]
        if self.arm_ids is not None:
            body["arm_ids"] = list(self.arm_ids)
        if self.exclude:
            body["exclude"] = list(self.exclude)
        if self.k != 1:
            body["k"] = self.k
        if self.context is not None:
            body["context"] = features_json(self.context)
        if self.user_features is not None:
            body["user_features"] = features_json(self.user_features)
        if self.min_version is not None:
            body["min_version"] = self.min_version
        return body | {name: True for name in ("explain", "deferred") if getattr(self, name)}


@final
@dataclass(frozen=True, slots=True)
class Reward:
    """How one chosen arm went."""

    decision_id: str
    reward: float
    #: May be left out when one arm was chosen.
    arm_id: str | None = None
    #: Counts once. Left out, it is the decision and the arm: each arm of a decision has one reward, however often it is
    #: sent; several of one arm (a click, later a purchase) need an id each.
    event_id: str | None = None

    def json(self) -> JsonObject:
        """The body, or one of its events."""
        body: JsonObject = {"decision_id": self.decision_id, "reward": self.reward}
        optional = {"arm_id": self.arm_id, "event_id": self.event_id}
        return body | {name: value for name, value in optional.items() if value is not None}


# What is answered


@final
@dataclass(frozen=True, slots=True)
class Item:
    """One chosen arm."""

    arm_id: str
    rank: int
    score: float
    mean: float
    bonus: float
    propensity: float
    group_size: int
    explanation: Mapping[str, Any] | None = None


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen arms, best first."""

    decision_id: str
    items: tuple[Item, ...]
    policy: str
    model_version: int
    cold_start: str | None
    logged: bool
    took_ms: float
    user_version: int | None = None

    @property
    def arm_id(self) -> str:
        """The first choice."""
        return self.items[0].arm_id


@final
@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one question of a batch: a decision or an error."""

    status: int
    decision: Decision | None = None
    error: ApiError | None = None

    def get(self) -> Decision:
        """The decision; raises the error that came instead."""
        if self.error is not None:
            raise self.error
        if self.decision is None:
            raise MetabanError(f"status {self.status} came without a decision")
        return self.decision


@final
@dataclass(frozen=True, slots=True)
class Rejection:
    """A reward that is not learned; `index` is its place in the batch."""

    index: int
    code: str
    detail: str


@final
@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """What became of the rewards; `applied` is None unless it was waited for."""

    accepted: int
    duplicates: int
    rejected: tuple[Rejection, ...]
    applied: bool | None = None


@final
@dataclass(frozen=True, slots=True)
class Activation:
    """A deferred decision that counts from now on."""

    decision_id: str
    activated_ms: int


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One part of the service."""

    ok: bool
    detail: str


@final
@dataclass(frozen=True, slots=True)
class Live:
    """The process answers."""

    version: str


@final
@dataclass(frozen=True, slots=True)
class Ready:
    """`ready`, `degraded` (answers come from memory) or `not ready`, and why."""

    status: str
    checks: Mapping[str, Check]

    @property
    def ok(self) -> bool:
        """Whether requests may be sent."""
        return self.status != "not ready"
