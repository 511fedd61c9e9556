"""What crosses the seam between the HTTP edge and the engine: commands in, outcomes out.

Everything here was validated by `service.intake`: ids are clean text of bounded length, numbers are finite and
fit float32, arms have distinct ids and, when their features are lists, one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from store.codec import Sample
from store.decisions import DecidedItem, OpenDecision
from store.users import UserSummary

#: One named feature: numbers enter as they are, strings and booleans are hashed.
FeatureValue: TypeAlias = float | str | bool
#: An arm or a context: plain numbers, or an object of named ones.
Features: TypeAlias = list[float] | dict[str, FeatureValue]


@final
@dataclass(frozen=True, slots=True)
class ArmInput:
    """One arm to choose from."""

    id: str
    features: Features


@final
@dataclass(frozen=True, slots=True)
class RecommendCommand:
    """Which of these arms for this user?"""

    user_id: str
    #: Empty to choose from the catalogue.
    arms: tuple[ArmInput, ...]
    context: Features | None
    k: int
    decision_id: str | None
    #: SHA-256 of what was asked, without decision_id, explain and min_version: the same decision_id with another one
    #: is a conflict.
    fingerprint: str
    #: The decision counts only once it is activated.
    deferred: bool = False
    #: What the request tells of the user, to be kept.
    user_features: Features | None = None
    #: The arms of the catalogue to choose from, of distinct ids; None for all of them.
    arm_ids: tuple[str, ...] | None = None
    #: Arms not to be chosen. Of `arms` enough are left for k.
    exclude: frozenset[str] = frozenset()
    #: Whether to tell why each arm was judged as it was.
    explain: bool = False
    #: The epoch that the answer must at least come from.
    min_version: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Contribution:
    """What one feature adds to a mean, and its value as the client knows it."""

    feature: str
    value: float
    contribution: float


@final
@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an arm was judged as it was: who agrees, and what the mean is made of.

    The contributions, intercept, memory and other add up to the mean.
    """

    group_size: int
    #: Users compared, the asking one among them.
    pool_size: int
    #: The share of them that is in the group.
    agreement: float
    members_mean: float
    members_spread: float
    mean: float
    bonus: float
    #: The posterior's deviation of the mean.
    sigma: float
    contributions: tuple[Contribution, ...]
    intercept: float
    memory: float
    other: float


@final
@dataclass(frozen=True, slots=True)
class Recommendation:
    """A decision as it was answered."""

    decision_id: str
    items: tuple[DecidedItem, ...]
    policy: str
    #: Number of the epoch whose shared parameters scored the arms.
    model_version: int
    #: Of a user without events: "fusion" when their profile told what they begin from, "meta" when they begin from
    #: what all users together taught; None for everyone else.
    cold_start: Literal["meta", "fusion"] | None
    #: The decision was made by an earlier request with the same decision_id.
    replayed: bool
    #: The decision is in the store, for certain; otherwise no reward can be learned for it.
    logged: bool = True
    #: Rewards of this user that the model had learned which decided.
    user_version: int = 0
    #: One for each item, or None where the model that decided is not served any more; empty unless asked for.
    explanations: tuple[Explanation | None, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class GroupQuery:
    """Who agrees with this user on such an arm?"""

    user_id: str
    features: Features
    context: Features | None
    #: Members to list.
    limit: int


@final
@dataclass(frozen=True, slots=True)
class GroupMember:
    """Somebody who agrees: what they expect of the arm, how far from the asking user, and by how many rewards."""

    user_id: str
    prediction: float
    distance: float
    events: int


@final
@dataclass(frozen=True, slots=True)
class GroupView:
    """A user's group on an arm, of which the nearest members are listed, the user first."""

    prediction: float
    threshold: float
    group_size: int
    #: Users compared, the asking one among them.
    pool_size: int
    #: Whether the pool leaves users out: it was chosen from more, or is full and the store counts more.
    sampled: bool
    #: Users that the store has a record of; None while it is away.
    users: int | None
    members: tuple[GroupMember, ...]
    model_version: int
    user_version: int
    cold_start: Literal["meta", "fusion"] | None


@final
@dataclass(frozen=True, slots=True)
class RewardCommand:
    """How one chosen arm of a decision went."""

    decision_id: str
    #: None means the only arm of a decision with k = 1.
    arm_id: str | None
    reward: float
    event_id: str | None
    #: Where in the request it stood, for errors to name.
    path: tuple[str | int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Rejection:
    """A reward that cannot be learned: its place in the request and why."""

    index: int
    code: str
    detail: str


@final
@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    """What became of the rewards of one request."""

    accepted: int
    duplicates: int
    rejected: tuple[Rejection, ...]
    #: Whether all of them are in the served model; None when the caller did not wait for it.
    applied: bool | None


@final
@dataclass(frozen=True, slots=True)
class Activation:
    """A decision that counts, and since when."""

    decision_id: str
    activated_ms: int


@final
@dataclass(frozen=True, slots=True)
class UserTraces:
    """What is left of a user who was forgotten, besides the tombstone."""

    decisions: int
    #: Events that a worker is about to void.
    waiting: int
    dead_letters: int
    samples: int
    log_lines: int
    #: Whether the candidate pool of the current epoch names them, fusion as a source, or a transfer job.
    pool: bool
    fusion: bool
    transfer: bool


@final
@dataclass(frozen=True, slots=True)
class NearUser:
    """A source of fusion near a user's profile, in standard deviations; one who was forgotten has no name."""

    user_id: str | None
    distance: float


@final
@dataclass(frozen=True, slots=True)
class WarmStartView:
    """What a user's learner began from: which fusion model made it, and who is near."""

    fusion_version: int
    #: The share of the prior's variance that it explains.
    trust: float
    created_ms: int
    nearest: tuple[NearUser, ...]


@final
@dataclass(frozen=True, slots=True)
class UserDescription:
    """What is known of a user, and whether this process holds their state in memory."""

    stored: UserSummary
    resident: bool
    #: Of the latest rewards, the newest first.
    events: tuple[Sample, ...]
    decisions: tuple[OpenDecision, ...]
    profile: Features | None
    #: None of one who began as everyone does.
    warm_start: WarmStartView | None
    #: Of one who was forgotten, or dropped by a restore.
    traces: UserTraces | None


@final
@dataclass(frozen=True, slots=True)
class Removed:
    """How much was deleted of a user."""

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
@dataclass(frozen=True, slots=True)
class UserForgotten:
    """A user who was forgotten: the incarnation that begins, and what became of what there was."""

    incarnation: int
    removed: Removed
    #: Events that a worker has not voided yet.
    waiting: int
    #: Of what the store's own file remembers.
    history: Literal["rewritten", "pending", "not ours"]


@final
@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the readiness report."""

    ok: bool
    detail: str
    #: Whether requests cannot be answered without it.
    vital: bool = True
