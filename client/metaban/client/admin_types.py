"""Answers of admin calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

Element = TypeVar("Element")


@final
@dataclass(frozen=True, slots=True)
class Page(Generic[Element]):
    """One page of a list. `cursor` requests the next page; it is None on the last.

    `count` is the length of the whole list; None where the service does not send it (only the catalogue has one).
    """

    items: tuple[Element, ...]
    cursor: str | None
    count: int | None = None


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
    """The users who agree with one user about an arm: that user first, the others by distance, up to `limit`."""

    prediction: float
    threshold: float
    group_size: int
    pool_size: int
    sampled: bool
    members: tuple[Member, ...]


@final
@dataclass(frozen=True, slots=True)
class UserEvent:
    """An arm of a decision with applied rewards: the latest of them."""

    arm_id: str
    reward: float
    propensity: float
    epoch: int
    received_ms: int


@final
@dataclass(frozen=True, slots=True)
class OpenDecision:
    """A decision that still accepts rewards."""

    decision_id: str
    expires_ms: int


@final
@dataclass(frozen=True, slots=True)
class Remnants:
    """What is left in the store of a forgotten user, besides the tombstone."""

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
    """A user with a similar profile. `distance` is in standard deviations; `user_id` is None if forgotten since."""

    user_id: str | None
    distance: float


@final
@dataclass(frozen=True, slots=True)
class WarmStart:
    """The warm start of a user: parameters made from the profile."""

    fusion_version: int
    #: Share of the prior's variance that the profile explains.
    trust: float
    created_ms: int
    nearest: tuple[NearUser, ...]


@final
@dataclass(frozen=True, slots=True)
class User:
    """What the store holds about a user."""

    user_id: str
    incarnation: int
    #: Rewards applied in this incarnation.
    version: int
    epoch: int | None
    samples: int
    resident: bool
    forgotten: bool
    #: First parameters of this user: `meta` (the prior) or `fusion` (a warm start).
    cold_start: str
    profile: tuple[float, ...] | Mapping[str, float | str | bool] | None
    events: tuple[UserEvent, ...]
    decisions: tuple[OpenDecision, ...]
    traces: Remnants | None
    warm_start: WarmStart | None = None


@final
@dataclass(frozen=True, slots=True)
class Removed:
    """Number of deleted entries."""

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
@dataclass(frozen=True, slots=True)
class Forgotten:
    """A forgotten user, with the new incarnation."""

    user_id: str
    incarnation: int
    removed: Removed
    waiting: int
    history: str


@final
@dataclass(frozen=True, slots=True)
class StreamTotals:
    """Events in the streams of all partitions."""

    waiting: int
    pending: int
    dead_letters: int
    oldest_age_ms: int | None
    counters: Mapping[str, int]
    unowned: int


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """Events in the stream of one partition, and the worker that owns it."""

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
    """State of the event streams."""

    totals: StreamTotals
    partitions: tuple[Partition, ...]


@final
@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Decisions whose predicted reward is between `low` and `high`."""

    low: float
    high: float
    samples: int
    predicted: float
    reward: float
    coverage: float


@final
@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions at decision time compared with the rewards received."""

    samples: int
    ece: float
    mce: float | None
    coverage: float
    bins: tuple[ReliabilityBin, ...]


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of the served epoch; None if it has no data yet."""

    model_version: int
    calibration: Reliability | None


@final
@dataclass(frozen=True, slots=True)
class LetterEvent:
    """The event of a dead letter."""

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
    """A dead letter: an event that could not be applied."""

    partition: int
    letter_id: str
    reason: str
    attempts: int
    buried_ms: int
    event: LetterEvent | None


@final
@dataclass(frozen=True, slots=True)
class Replayed:
    """Number of dead letters replayed. Call again with `cursor` until it is None."""

    replayed: int
    refused: int
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot file. If it cannot be read, only `id`, `size` and `problem` are set."""

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
    """Progress of a job."""

    doing: str
    done: int
    total: int | None


@final
@dataclass(frozen=True, slots=True)
class Job:
    """A job; `state` is `running`, `done` or `failed`."""

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
    """How well profiles predict the first rewards of held-out users: losses in nats per user; `summary` in words."""

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
    """The latest training of the fusion model; `state` is `idle`, `queued`, `running`, `failed` or `done`."""

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
    """State of warm starts; `version` is None while there is no fusion model."""

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
    """Live settings of a namespace; `overridden` names those that differ from the deployment."""

    namespace: str
    #: Counts changes.
    revision: int
    settings: Mapping[str, Any]
    overridden: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class AuditLine:
    """One admin action; `actor` is the first part of the digest of the key."""

    at_ms: int
    actor: str
    action: str
    target: str
    request_id: str
    detail: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace; `dimension` and `layout` are None until the first request fixes them."""

    name: str
    preset: str
    partitions: int
    dimension: int | None
    layout: Mapping[str, Any] | None
    overridden: tuple[str, ...]
    revision: int


@final
@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The request of a transfer job; if `sources` is None, every other cluster is a source."""

    user_id: str | None
    cluster: int | None
    sources: tuple[str, ...] | None
    metric: str


@final
@dataclass(frozen=True, slots=True)
class TransferTarget:
    """The target: one user, or the users of a cluster."""

    user_id: str | None
    cluster: int | None
    users: int
    events: int


@final
@dataclass(frozen=True, slots=True)
class TransferSource:
    """Effect of one source on the target. A coefficient below 0 means that it helps; a gain is a lower loss."""

    user_id: str | None
    cluster: int | None
    users: int
    events: int
    coefficient: float
    low: float
    high: float
    selected: bool
    predicted_gain: float
    gain: float


@final
@dataclass(frozen=True, slots=True)
class TransferLosses:
    """Loss of the target alone, with all sources, and with the selected sources."""

    alone: float
    everything: float
    selected: float


@final
@dataclass(frozen=True, slots=True)
class TransferSurrogate:
    """Mean squared error of the losses predicted by sums of coefficients, and the variance of the losses."""

    error: float
    variance: float


@final
@dataclass(frozen=True, slots=True)
class TransferResult:
    """Which sources help a target, the most helpful first."""

    target: TransferTarget
    metric: str
    losses: TransferLosses
    predicted_gain: float
    gain: float
    gain_error: float
    applies: bool
    gamma: float
    subsets: int
    surrogate: TransferSurrogate
    sources: tuple[TransferSource, ...]


@final
@dataclass(frozen=True, slots=True)
class TransferJob:
    """A transfer job; `state` is `queued`, `running`, `failed` or `done`. `result` is None until then, and in lists."""

    id: str
    state: str
    progress: float
    doing: str
    requested_ms: int
    started_ms: int | None
    finished_ms: int | None
    reason: str | None
    request: TransferRequest
    result: TransferResult | None = None


@final
@dataclass(frozen=True, slots=True)
class TransferOverview:
    """The transfer jobs of the last day, newest first, and the number of clusters in the served epoch."""

    jobs: tuple[TransferJob, ...]
    clusters: int
    model_version: int


ImportMode: TypeAlias = Literal["upsert", "replace"]
LetterOrder: TypeAlias = Literal["newest", "oldest"]
