"""Requests and responses of POST /recommend and POST /recommend/batch."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from metaban.service.http.schemas.arms import ArmIn
from metaban.service.http.schemas.examples import FIRST_ORDER, FROM_CATALOGUE, SECOND_ORDER, THIRD_ORDERS
from metaban.service.http.schemas.fields import DecisionId, FeaturesIn, Identifier, RequestModel
from metaban.store.codec import ITEMS_MAX

MAX_INT64: Final = 2**63 - 1

#: Requests in one batch.
MAX_REQUESTS: Final = 100

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


EXPLANATION_EXAMPLE: Final[dict[str, Any]] = {
    "group_size": 8,
    "pool_size": 10,
    "agreement": 0.8,
    "members_mean": 0.532,
    "members_spread": 0.022,
    "mean": 0.47,
    "bonus": 0.038,
    "sigma": 0.128,
    "looks": 1.0,
    "shared": 0.476,
    "user": -0.035,
    "arm": 0.063,
    "taste": 0.001,
    "memory": -0.035,
    "contributions": [
        {"feature": "kind=tea", "value": 1.0, "contribution": 0.027},
        {"feature": "hot", "value": 1.0, "contribution": 0.018},
    ],
    "absent": 0.016,
    "intercept": 0.375,
    "other": 0.005,
}


@final
class RecommendRequest(RequestModel):
    """A user, and the arms to choose from."""

    model_config = ConfigDict(json_schema_extra={"examples": [FIRST_ORDER, SECOND_ORDER, FROM_CATALOGUE]})

    user_id: Identifier = Field(description="The user; may be new.")
    arms: Annotated[list[ArmIn], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="The arms to choose from. Left out: the catalogue."
    )
    arm_ids: Annotated[list[Identifier], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Choose among these arms of the catalogue. Not together with `arms`."
    )
    exclude: Annotated[list[Identifier], Field(fail_fast=True)] | None = Field(
        default=None, description="Arms that must not be chosen; unknown ids are ignored."
    )
    k: int = Field(
        default=1,
        ge=1,
        le=ITEMS_MAX,
        description="Number of arms to choose; at most the number of `arms`. A smaller catalogue returns fewer.",
    )
    context: FeaturesIn | None = Field(
        default=None,
        description="Features of the situation, the same for all arms. All requests of a namespace have a context, or "
        "none has: the first request fixes it.",
        examples=[{"hour": 8, "weather": "rain"}],
    )
    user_features: FeaturesIn | None = Field(
        default=None,
        description="Profile of the user. The latest one is kept until the user is forgotten; new users may get a warm "
        "start from it. All profiles of a namespace have the form of the first: a list of the same length, at most "
        "256 numbers, or an object of named values, which are hashed.",
    )
    decision_id: DecisionId | None = Field(
        default=None,
        description="Makes the request safe to repeat: the same id with the same body gets the same answer, with "
        "another body 409. Generated when left out.",
    )
    deferred: bool = Field(
        default=False,
        description="The decision counts only after POST /decisions/{decision_id}/activate, which reports that its "
        "arms were shown. Until then rewards are refused.",
    )
    explain: bool = Field(default=False, description="Whether to explain the score of each chosen arm.")
    min_version: int | None = Field(
        default=None,
        ge=0,
        le=MAX_INT64,
        description="Answer only from this epoch (`model_version`) or a later one: waits for it for at most "
        "METABAN_WAIT_APPLIED_TIMEOUT_S, then 503. An earlier decision with this id is returned unchanged.",
    )


@final
class RecommendBatch(RequestModel):
    """Several requests."""

    model_config = ConfigDict(json_schema_extra={"examples": [THIRD_ORDERS]})

    # Validated one by one: an invalid request does not affect the others.
    requests: list[Annotated[Any, WithJsonSchema({"$ref": "#/components/schemas/RecommendRequest"})]] = Field(
        min_length=1, max_length=MAX_REQUESTS, description="Bodies of POST /recommend."
    )


@final
class ContributionOut(BaseModel):
    """What one feature adds to the mean, compared with an arm that has the average of it."""

    feature: str = Field(
        description="A name, `name=value` for a string, `arm[3]` or `context[0]` for lists, `a × b` for products. "
        "Names hashed to one input are joined by ` | `.",
        examples=["kind=tea"],
    )
    value: float = Field(description="Value of the learner's input.")
    contribution: float = Field(
        description="The slope of the mean in this input, times the value's distance to its average over all samples."
    )


@final
class ExplanationOut(BaseModel):
    """The group of an arm, and the parts of its mean.

    `shared`, `user`, `arm`, `taste` and `memory` add up to `mean`, up to rounding. `shared` and `user` together are
    also split by features: `contributions`, `absent`, `intercept` and `other`.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [EXPLANATION_EXAMPLE]})

    group_size: int = Field(description="Users who agree on this arm, including this user.")
    pool_size: int = Field(description="Users compared, including this user.")
    agreement: float = Field(description="`group_size` / `pool_size`.")
    members_mean: float = Field(description="Mean prediction of the members of the group.")
    members_spread: float = Field(description="Standard deviation of their predictions.")
    mean: float
    bonus: float
    sigma: float = Field(description="Posterior standard deviation of the mean.")
    looks: float = Field(
        description="How often arms at this rank are looked at, relative to the first, where it is 1. `looks` times "
        "`mean` is the expected reward at this rank."
    )
    shared: float = Field(description="What the features are worth to a user without rewards.")
    user: float = Field(description="What this user's own rewards change in that.")
    arm: float = Field(description="What this arm earns from all users beyond its features; 0 until it has rewards.")
    taste: float = Field(description="What this user likes about the arm that no feature says.")
    memory: float = Field(description="Correction by the user's rewards for nearly the same arms.")
    contributions: list[ContributionOut] = Field(description="The ten largest that are not 0, largest first.")
    absent: float = Field(description="Contributions of named features that the arm and the context do not have.")
    intercept: float = Field(description="`shared` and `user` of an arm whose features are all average.")
    other: float = Field(description="The rest: smaller contributions, and parts that are not linear in the features.")


@final
class ItemOut(BaseModel):
    """One chosen arm."""

    arm_id: str
    rank: int = Field(description="1 for the first choice.")
    score: float = Field(description="Mean plus bonus; arms are ranked by it.")
    mean: float = Field(description="Expected reward of this arm.")
    bonus: float = Field(description="Exploration bonus for uncertainty.")
    propensity: float = Field(
        description="Probability with which this arm was chosen at this rank, given those ranked above it."
    )
    group_size: int = Field(description="Users who agree on this arm, including this user.")
    explanation: ExplanationOut | None = Field(
        default=None,
        description="Only with `explain`; null for an earlier decision of a model that is no longer served.",
    )


@final
class RecommendResponse(BaseModel):
    """The decision, with what is needed to evaluate it later."""

    model_config = ConfigDict(json_schema_extra={"examples": [DECISION_EXAMPLE]})

    decision_id: str = Field(description="Send it back with the reward.")
    items: list[ItemOut] = Field(description="The chosen arms, best first.")
    policy: str = Field(description="How the arms were chosen from their scores.")
    model_version: int = Field(description="The epoch of the shared parameters; grows as the service learns.")
    user_version: int = Field(description="This user's rewards already learned when the decision was made.")
    cold_start: Literal["meta", "fusion"] | None = Field(
        description="How a user without rewards was scored: `meta`, from the prior of all users; `fusion`, from "
        "a warm start made from their profile. null for other users."
    )
    logged: bool = Field(
        description="Whether the decision is recorded. False while the store does not answer: its rewards are unknown."
    )
    took_ms: float = Field(description="Milliseconds from the arrival of the body to the answer.")
