"""The JSON of requests and responses, as OpenAPI shows it.

Nothing is guessed: a boolean is not a number, a number in quotes is not a number, unknown members are refused.
Limits that are settings, and what no single field can tell, are checked in `service.intake`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeAlias, final

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from service.examples import FIRST_ORDER, FROM_CATALOGUE, SECOND_ORDER, SENCHA
from service.schemas_explaining import ExplanationOut

#: Larger numbers overflow float32 as soon as they are squared or summed.
MAX_MAGNITUDE: Final = 1e30
MAX_ID_CHARS: Final = 256
MAX_ITEMS: Final = 100
MAX_EVENTS: Final = 1000
MAX_INT64: Final = 2**63 - 1
DECISION_ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"
#: Visible ASCII; with the place in a batch behind it, it is still shorter than an event_id may be.
IDEMPOTENCY_KEY_PATTERN: Final = r"^[!-~]{1,200}$"
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: The same for readers of the documentation, whose regular expressions are JavaScript's.
NO_CONTROL_CHARACTERS: Final = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*$"

#: Pydantic puts the name of a union's member into the path of an error; these are taken out again.
LIST, OBJECT, NUMBER, TEXT, FLAG = "<list>", "<object>", "<number>", "<text>", "<flag>"
UNION_TAGS: Final = frozenset({LIST, OBJECT, NUMBER, TEXT, FLAG})


def _without_control_characters(text: str) -> str:
    if CONTROL_CHARACTERS.search(text):
        raise PydanticCustomError("control_character", "must not contain control characters")
    return text


def _kind_of_features(value: Any) -> str | None:
    return LIST if isinstance(value, list) else OBJECT if isinstance(value, dict) else None


def _kind_of_value(value: Any) -> str | None:
    if isinstance(value, bool):
        return FLAG
    return NUMBER if isinstance(value, int | float) else TEXT if isinstance(value, str) else None


Identifier: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=MAX_ID_CHARS, json_schema_extra={"pattern": NO_CONTROL_CHARACTERS}),
    AfterValidator(_without_control_characters),
]
DecisionId: TypeAlias = Annotated[str, Field(pattern=DECISION_ID_PATTERN)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]
NamedValue: TypeAlias = Annotated[
    Annotated[Number, Tag(NUMBER)]
    | Annotated[str, Field(max_length=MAX_ID_CHARS), Tag(TEXT)]
    | Annotated[bool, Tag(FLAG)],
    Discriminator(
        _kind_of_value,
        custom_error_type="feature_value",
        custom_error_message="must be a number, a string or a boolean",
    ),
]
FeatureName: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
FeaturesIn: TypeAlias = Annotated[
    Annotated[list[Number], Field(min_length=1, fail_fast=True), Tag(LIST)]
    | Annotated[dict[FeatureName, NamedValue], Field(min_length=1), Tag(OBJECT)],
    Discriminator(
        _kind_of_features,
        custom_error_type="features",
        custom_error_message="must be a list of numbers, or an object of named numbers, strings and booleans",
    ),
]


class RequestModel(BaseModel):
    """What clients send: strict, closed, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@final
class ArmIn(RequestModel):
    """One arm to choose from."""

    model_config = ConfigDict(json_schema_extra={"examples": [SENCHA]})

    id: Identifier = Field(description="Names the arm in the answer and in its rewards.", examples=["sencha"])
    features: FeaturesIn = Field(
        description="What is known about the arm: the same number of numbers in every arm, or an object of named "
        "values, which are hashed."
    )


@final
class ArmFeaturesIn(RequestModel):
    """What is known about an arm that the path names."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"features": SENCHA["features"]}]})

    features: FeaturesIn


@final
class ArmLine(RequestModel):
    """One line of an import. What an export says beyond the arm itself is taken and ignored."""

    id: Identifier
    features: FeaturesIn
    version: Any = None
    updated_ms: Any = None


@final
class RecommendRequest(RequestModel):
    """Which of these arms for this user?"""

    model_config = ConfigDict(json_schema_extra={"examples": [FIRST_ORDER, SECOND_ORDER, FROM_CATALOGUE]})

    user_id: Identifier = Field(description="Who it is for; a user never seen before is welcome.")
    arms: Annotated[list[ArmIn], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="What there is to choose from. Left out: the catalogue."
    )
    arm_ids: Annotated[list[Identifier], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Choose among these arms of the catalogue. Not together with `arms`."
    )
    exclude: Annotated[list[Identifier], Field(fail_fast=True)] | None = Field(
        default=None, description="Arms not to be chosen; ids of no arm are ignored."
    )
    k: int = Field(
        default=1,
        ge=1,
        le=MAX_ITEMS,
        description="How many arms to choose: no more than are left of `arms`; of the catalogue as many as there are.",
    )
    context: FeaturesIn | None = Field(
        default=None,
        description="What is known about the moment, the same for all arms: with every request of a namespace or with "
        "none, as the first did.",
        examples=[{"hour": 8, "weather": "rain"}],
    )
    user_features: FeaturesIn | None = Field(
        default=None,
        description="What is known about the user; kept, as told last, until the user is forgotten, and what a new "
        "user's learner is made from where that helps. All of a namespace look as the first did: a list of as many "
        "numbers, at most 256, or an object of named values, which are hashed.",
    )
    decision_id: DecisionId | None = Field(
        default=None,
        description="Makes the request safe to repeat: the same id with the same body gets the same answer, with "
        "another body 409. One is made up when left out.",
    )
    deferred: bool = Field(
        default=False,
        description="The decision counts only once it is activated, when its choice is shown: until then it takes no "
        "rewards.",
    )
    explain: bool = Field(default=False, description="Whether to tell why each chosen arm was judged as it was.")
    min_version: int | None = Field(
        default=None,
        ge=0,
        le=MAX_INT64,
        description="Answer only from this epoch (`model_version`) or a later one: waits for it for at most "
        "METABAN_WAIT_APPLIED_TIMEOUT_S, then 503. A decision that was made before is returned as it was made.",
    )


@final
class ItemOut(BaseModel):
    """One chosen arm."""

    arm_id: str
    rank: int = Field(description="1 for the first choice.")
    score: float = Field(description="Mean plus bonus: what arms are ranked by.")
    mean: float = Field(description="Reward expected from this arm.")
    bonus: float = Field(description="Added for what is not known yet.")
    propensity: float = Field(
        description="Probability with which this arm was chosen at this rank, given those ranked above it."
    )
    group_size: int = Field(description="Users who agree about this arm, the asking one among them.")
    explanation: ExplanationOut | None = Field(
        default=None,
        description="Left out unless asked for with `explain`; null of a decision made before by a model that is not "
        "served here any more.",
    )


DECISION_EXAMPLE: Final[dict[str, Any]] = {
    "decision_id": "first-order",
    "items": [
        {
            "arm_id": "sencha",
            "rank": 1,
            "score": 0.61,
            "mean": 0.48,
            "bonus": 0.13,
            "propensity": 0.9867,
            "group_size": 12,
        }
    ],
    "policy": "ucb-floor",
    "model_version": 7,
    "user_version": 31,
    "cold_start": None,
    "logged": True,
    "took_ms": 1.9,
}


@final
class RecommendResponse(BaseModel):
    """The choice, and all that is needed to evaluate it later."""

    model_config = ConfigDict(json_schema_extra={"examples": [DECISION_EXAMPLE]})

    decision_id: str = Field(description="Send it back with the reward.")
    items: list[ItemOut] = Field(description="The chosen arms, best first.")
    policy: str = Field(description="How the arms were chosen from their scores.")
    model_version: int = Field(description="The epoch of the shared parameters; grows as the service learns.")
    user_version: int = Field(description="Rewards of this user that the model had learned which decided.")
    cold_start: Literal["meta", "fusion"] | None = Field(
        description="What a user without rewards was judged by: `meta`, what all users together taught; `fusion`, a "
        "learner made from their profile and what users with profiles have learned. null otherwise."
    )
    logged: bool = Field(
        description="Whether the decision is recorded. False while the store is away: no reward can be learned for it."
    )
    took_ms: float = Field(description="Milliseconds from the arrival of the body to the answer.")


@final
class RewardIn(RequestModel):
    """How one chosen arm went."""

    decision_id: DecisionId = Field(description="As the recommendation said.")
    arm_id: Identifier | None = Field(
        default=None, description="Which of the chosen arms; may be left out when one was chosen."
    )
    reward: Number = Field(
        description="Within the namespace's range, from 0 (nothing) to 1 (all one can wish for) unless it is set."
    )
    event_id: Identifier | None = Field(
        default=None,
        description="Counts once however often it is sent. Left out, it is the decision and the arm: one reward "
        "for each.",
    )


@final
class RewardBatch(RequestModel):
    """Many rewards at once; each is accepted or rejected by itself."""

    events: Annotated[list[RewardIn], FailFast()] = Field(min_length=1, max_length=MAX_EVENTS)


@final
class RejectionOut(BaseModel):
    """A reward that will not be learned."""

    index: int = Field(description="Its place in `events`, from 0.")
    code: str = Field(
        examples=[
            "unknown-decision", "unknown-arm", "arm-required", "user-reset", "not-activated", "late", "not-learned",
        ]
    )  # fmt: skip
    detail: str


@final
class FeedbackResponse(BaseModel):
    """What became of the rewards."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}]}
    )

    accepted: int = Field(description="Stored, and learned exactly once.")
    duplicates: int = Field(description="Stored before under the same event_id; nothing was done.")
    rejected: list[RejectionOut]
    applied: bool | None = Field(
        default=None,
        description="With `?wait=applied`: whether the served model has learned them; false when the wait ran out.",
    )


@final
class CheckOut(BaseModel):
    """One part of the service."""

    ok: bool
    detail: str


@final
class LiveResponse(BaseModel):
    """The process answers."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "live", "version": "0.1.0"}]})

    status: Literal["live"] = "live"
    version: str


@final
class ReadyResponse(BaseModel):
    """Whether traffic may be sent here, and why not."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "status": "ready",
                    "checks": {
                        "store": {"ok": True, "detail": "answers"},
                        "replica": {"ok": True, "detail": "follows the updates"},
                    },
                }
            ]
        }
    )

    status: Literal["ready", "degraded", "not ready"] = Field(
        description="`degraded`: recommendations are answered from memory and not recorded, rewards are refused."
    )
    checks: dict[str, CheckOut]


@final
class FieldProblem(BaseModel):
    """One thing wrong with one field."""

    field: str = Field(description="Empty for the body as a whole.", examples=["arms[3].features[1]"])
    detail: str


@final
class Problem(BaseModel):
    """Why a request failed, as RFC 9457 has it."""

    type: str = Field(examples=["/problems/invalid-input"])
    title: str
    status: int
    detail: str
    instance: str = Field(description="The request id, as in the X-Request-ID header and the logs.")
    errors: list[FieldProblem] | None = Field(default=None, description="Left out when no field is to blame.")
