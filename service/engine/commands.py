"""Commands from HTTP to the engine, and their results.

`metaban.service.http.parsing` has validated the commands: ids have a bounded length and no control characters, numbers
are finite and fit float32, arms have distinct ids and, if their features are lists, lists of one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from metaban.store.codec import Sample
from metaban.store.decisions.decisions import DecisionRecord, OpenDecisionRecord
from metaban.store.users.records import UserSummary
from metaban.store.users.warm_starts import StoredWarmStart

#: One named feature: numbers enter as they are, strings and booleans are hashed.
FeatureValue: TypeAlias = float | str | bool

#: An arm, a context or a profile: a list of numbers, or an object of named values.
Features: TypeAlias = list[float] | dict[str, FeatureValue]


@final
@dataclass(frozen=True, slots=True)
class ArmInput:
    """One arm of a request."""

    id: str
    features: Features


@final
@dataclass(frozen=True, slots=True)
class RecommendCommand:
    """POST /recommend."""

    user_id: str
    #: Empty to choose from the catalogue.
    arms: tuple[ArmInput, ...]
    context: Features | None
    k: int
    decision_id: str | None
    #: SHA-256 of the request without decision_id, explain and min_version. A decision_id used again with another
    #: fingerprint is a conflict.
    fingerprint: str
    #: The decision takes no rewards until it is activated.
    deferred: bool = False
    #: The user's profile, to be stored.
    user_features: Features | None = None
    #: Distinct ids of catalogue arms to choose from; None means all.
    arm_ids: tuple[str, ...] | None = None
    #: Arms not to choose. If `arms` is given, at least k of them are left.
    exclude: frozenset[str] = frozenset()
    #: Whether to explain the score of each chosen arm.
    explain: bool = False
    #: The lowest epoch that may answer.
    min_version: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Contribution:
    """What one feature adds to the mean of an average arm, with the value the client sent."""

    feature: str
    value: float
    contribution: float


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an arm has its score: who agrees on it, and the parts of its mean.

    shared + user + arm + taste + memory = mean, up to rounding. Of these, shared + user is split by features:
    contributions + absent + intercept + other.
    """

    group_size: int
    #: Users compared, including the asking one.
    pool_size: int
    #: group_size / pool_size.
    agreement: float
    members_mean: float
    members_spread: float
    mean: float
    bonus: float
    #: Posterior standard deviation of the mean.
    sigma: float
    #: How often the place of the arm is looked at, relative to the first; times the mean, its expected reward there.
    looks: float
    #: From the features, for a user without rewards.
    shared: float
    #: From the features, by what this user's rewards change.
    user: float
    arm: float
    taste: float
    memory: float
    contributions: tuple[Contribution, ...]
    #: Of features that the arm and the context do not have.
    absent: float
    intercept: float
    other: float


@final
@dataclass(slots=True)
class Recommendation:
    """A decision and how it was reached."""

    decision: DecisionRecord
    #: One per item, None where the model that decided is no longer served; empty unless asked for.
    explanations: tuple[Explanation | None, ...] = ()
    #: The warm start made for this decision, stored with it.
    start: StoredWarmStart | None = None
    #: The decision was made by an earlier request with the same decision_id.
    replayed: bool = False
    #: The decision is in the store. If not, it takes no rewards.
    logged: bool = False


@final
@dataclass(frozen=True, slots=True)
class GroupQuery:
    """A user and an arm whose group is asked for."""

    user_id: str
    features: Features
    context: Features | None
    #: Members to list.
    limit: int
    #: None for an arm that is known by its features alone.
    arm_id: str | None = None


@final
@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group: their prediction of the arm, its distance to the asking user's, and their event count."""

    user_id: str
    prediction: float
    distance: float
    events: int


@final
@dataclass(frozen=True, slots=True)
class GroupView:
    """The group of a user on an arm. The nearest members are listed, the user first."""

    prediction: float
    threshold: float
    group_size: int
    #: Users compared, including the asking one.
    pool_size: int
    #: Whether the pool leaves users out: it was sampled, or is full while the store counts more users.
    sampled: bool
    #: Users with a record in the store; None while the store is unavailable.
    users: int | None
    members: tuple[GroupMember, ...]
    model_version: int
    user_version: int
    cold_start: Literal["meta", "fusion"] | None


@final
@dataclass(frozen=True, slots=True)
class RewardCommand:
    """One reward of POST /feedback."""

    decision_id: str
    #: None stands for the only arm of a decision with k = 1.
    arm_id: str | None
    reward: float
    event_id: str | None
    #: Its place in the request, for errors.
    path: tuple[str | int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class RejectedReward:
    """A reward that is not learned: its place in the request, and why."""

    index: int
    code: str
    detail: str


@final
@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    """The result of one POST /feedback."""

    accepted: int
    duplicates: int
    rejected: tuple[RejectedReward, ...]
    #: Whether all of them are in the served model; None when the caller did not wait for it.
    applied: bool | None


@final
@dataclass(frozen=True, slots=True)
class UserRemnants:
    """What is left in the store of a forgotten user, besides the tombstone."""

    decisions: int
    #: Events that a worker still has to void.
    waiting: int
    dead_letters: int
    samples: int
    log_lines: int
    #: Whether the user is in the pool of the current epoch, a source of the fusion model, named by a transfer job.
    pool: bool
    fusion: bool
    transfer: bool


@final
@dataclass(frozen=True, slots=True)
class WarmStartSource:
    """A fusion source near a user's profile. The distance is in standard deviations; a forgotten user has no id."""

    user_id: str | None
    distance: float


@final
@dataclass(frozen=True, slots=True)
class WarmStartView:
    """A user's warm start: the fusion model that made it, and the nearest sources."""

    fusion_version: int
    #: The share of the prior's variance that it explains.
    trust: float
    created_ms: int
    nearest: tuple[WarmStartSource, ...]


@final
@dataclass(frozen=True, slots=True)
class UserDescription:
    """What is stored about a user, and whether this process holds their state in memory."""

    stored: UserSummary
    resident: bool
    #: The latest samples, the newest first.
    events: tuple[Sample, ...]
    decisions: tuple[OpenDecisionRecord, ...]
    profile: Features | None
    #: None for a user who started at the prior.
    warm_start: WarmStartView | None
    #: Set for a user who was forgotten, or dropped by a restore.
    remnants: UserRemnants | None


@final
@dataclass(frozen=True, slots=True)
class RemovedRecords:
    """Number of records deleted when a user was forgotten."""

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
@dataclass(frozen=True, slots=True)
class UserForgotten:
    """The result of forgetting a user, with their new incarnation."""

    incarnation: int
    removed: RemovedRecords
    #: Events that a worker has not voided yet.
    waiting: int
    #: State of the append-only file of the store.
    history: Literal["rewritten", "pending", "not ours"]


@final
@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the readiness report."""

    ok: bool
    detail: str
    #: Whether requests can be answered only if it succeeds.
    vital: bool = True
