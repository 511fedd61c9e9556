"""What administrators are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

Element = TypeVar("Element")


@final
@dataclass(frozen=True, slots=True)
class Page(Generic[Element]):
    """A part of a list; ask for the next one with `cursor`, which is None on the last."""

    items: tuple[Element, ...]
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of the catalogue."""

    id: str
    features: tuple[float, ...] | Mapping[str, float | str | bool]
    version: int
    updated_ms: int


@final
@dataclass(frozen=True, slots=True)
class Member:
    """A user who agrees about an arm."""

    user_id: str
    prediction: float
    distance: float
    events: int


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The users who agree with one about an arm: that one first, then by distance, as many as were asked for."""

    prediction: float
    threshold: float
    group_size: int
    pool_size: int
    sampled: bool
    members: tuple[Member, ...]


@final
@dataclass(frozen=True, slots=True)
class UserEvent:
    """A reward that was learned."""

    arm_id: str
    reward: float
    propensity: float
    epoch: int
    received_ms: int


@final
@dataclass(frozen=True, slots=True)
class OpenDecision:
    """A decision that still takes rewards."""

    decision_id: str
    expires_ms: int


@final
@dataclass(frozen=True, slots=True)
class Traces:
    """What is left of a user who was forgotten, besides the tombstone."""

    decisions: int
    waiting: int
    dead_letters: int
    samples: int
    log_lines: int
    pool: bool
    fusion: bool = False
    transfer: bool = False


@final
@dataclass(frozen=True, slots=True)
class NearUser:
    """Somebody whose profile is near, in standard deviations; None: forgotten since."""

    user_id: str | None
    distance: float


@final
@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a learner began from that was made from the user's profile."""

    fusion_version: int
    #: Share of the prior's variance that it explains.
    trust: float
    created_ms: int
    nearest: tuple[NearUser, ...]


@final
@dataclass(frozen=True, slots=True)
class User:
    """What is stored of a user."""

    user_id: str
    incarnation: int
    #: Rewards learned in this incarnation.
    version: int
    epoch: int | None
    samples: int
    resident: bool
    forgotten: bool
    #: What the learner began from: `meta` or `fusion`.
    cold_start: str
    profile: tuple[float, ...] | Mapping[str, float | str | bool] | None
    events: tuple[UserEvent, ...]
    decisions: tuple[OpenDecision, ...]
    traces: Traces | None
    warm_start: WarmStart | None = None


@final
@dataclass(frozen=True, slots=True)
class Removed:
    """How much was deleted."""

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
@dataclass(frozen=True, slots=True)
class Forgotten:
    """A user who began anew."""

    user_id: str
    incarnation: int
    removed: Removed
    waiting: int
    history: str


@final
@dataclass(frozen=True, slots=True)
class StreamTotals:
    """Rewards on their way, over all partitions."""

    waiting: int
    pending: int
    dead_letters: int
    oldest_age_ms: int | None
    counters: Mapping[str, int]
    unowned: int


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """Rewards on their way in one partition, and the worker that reads it."""

    partition: int
    waiting: int
    pending: int
    dead_letters: int
    oldest_age_ms: int | None
    counters: Mapping[str, int]
    consumers: int
    owner: str | None


@final
@dataclass(frozen=True, slots=True)
class Stream:
    """How rewards are doing on their way to the learner."""

    totals: StreamTotals
    partitions: tuple[Partition, ...]


@final
@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Decisions whose reward was predicted to lie between `low` and `high`."""

    low: float
    high: float
    samples: int
    predicted: float
    reward: float
    coverage: float


@final
@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions noted when decisions were made, against the rewards since."""

    samples: int
    ece: float
    mce: float | None
    coverage: float
    bins: tuple[ReliabilityBin, ...]


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """How reliable predictions are, by the served epoch; None where nothing is known of it."""

    model_version: int
    calibration: Reliability | None


@final
@dataclass(frozen=True, slots=True)
class LetterEvent:
    """The reward that could not be learned."""

    user_id: str
    incarnation: int
    decision_id: str
    arm_id: str
    event_id: str
    reward: float
    received_ms: int


@final
@dataclass(frozen=True, slots=True)
class Letter:
    """An event that was given up on."""

    partition: int
    letter_id: str
    reason: str
    attempts: int
    buried_ms: int
    event: LetterEvent | None


@final
@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the letters that were put back; call again with `cursor` while it is not None."""

    replayed: int
    refused: int
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything learned, in a file; of one that cannot be read only id and size are known."""

    id: str
    size: int
    name: str = ""
    namespace: str | None = None
    created_ms: int | None = None
    users: int | None = None
    events: int | None = None
    epoch: int | None = None
    intact: bool | None = None
    problem: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is."""

    doing: str
    done: int
    total: int | None


@final
@dataclass(frozen=True, slots=True)
class Job:
    """Work that goes on after the request: `running`, `done` or `failed`."""

    id: str
    kind: str
    state: str
    started_ms: int
    finished_ms: int | None
    progress: Progress
    result: Mapping[str, Any] | None
    error: str | None


@final
@dataclass(frozen=True, slots=True)
class FusionGuard:
    """How first rewards of users held out were foretold by profiles, in nats a user; `summary` has it in words."""

    verdict: str
    blend: float
    trust: float
    held_out: int
    events: int
    prior_loss: float
    fusion_loss: float
    gain: float
    gain_error: float
    summary: str


@final
@dataclass(frozen=True, slots=True)
class FusionJob:
    """The latest training of fusion: `idle`, `queued`, `running`, `failed` or `done`."""

    state: str
    progress: float
    doing: str
    by: str | None
    requested_ms: int | None
    started_ms: int | None
    finished_ms: int | None
    reason: str | None


@final
@dataclass(frozen=True, slots=True)
class Fusion:
    """What new users' learners are made from; `version` is None while there is no fusion model."""

    available: bool
    setting: str
    version: int | None
    served: int | None
    trained_ms: int | None
    sources: int | None
    profile_size: int | None
    guard: FusionGuard | None
    job: FusionJob


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """What can be changed in a namespace while it is served, as it is now; `overridden` differs from the deployment."""

    namespace: str
    #: Grows with every change.
    revision: int
    settings: Mapping[str, Any]
    overridden: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class AuditLine:
    """One thing that an admin did; `actor` is the beginning of the digest of their key."""

    at_ms: int
    actor: str
    action: str
    target: str
    request_id: str
    detail: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Namespace:
    """One recommender of a deployment; dimension and layout are None until the first request shows them."""

    name: str
    preset: str
    partitions: int
    dimension: int | None
    layout: Mapping[str, Any] | None
    overridden: tuple[str, ...]
    revision: int


ImportMode: TypeAlias = Literal["upsert", "replace"]
LetterOrder: TypeAlias = Literal["newest", "oldest"]
