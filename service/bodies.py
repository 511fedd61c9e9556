"""More of what clients send, beside `service.schemas`, and as strict."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, final

from pydantic import ConfigDict, Field, WithJsonSchema

from service.examples import SENCHA, THIRD_ORDERS, TRANSFER_EXAMPLES
from service.schemas import FeaturesIn, Identifier, RequestModel
from store.transfer import SOURCES_MAX, SOURCES_MIN

#: Requests in one batch.
MAX_REQUESTS: Final = 100
#: Members listed, unless asked for more or fewer, and at most.
MEMBERS_LISTED: Final = 100
MEMBERS_MAX: Final = 1_000
#: Clusters are counted from 0; no learner tells more of them apart.
CLUSTER_MAX: Final = 1_000_000
#: Those of `models.transfer_metrics`.
MetricName: TypeAlias = Literal[
    "mse", "cross-entropy", "margin", "worst-group-accuracy", "demographic-parity", "equal-opportunity"
]


@final
class RecommendBatch(RequestModel):
    """Many requests at once."""

    model_config = ConfigDict(json_schema_extra={"examples": [THIRD_ORDERS]})

    # Each is validated by itself: what is wrong with one is no matter of the others.
    requests: list[Annotated[Any, WithJsonSchema({"$ref": "#/components/schemas/RecommendRequest"})]] = Field(
        min_length=1, max_length=MAX_REQUESTS, description="As POST /recommend takes them."
    )


@final
class GroupRequest(RequestModel):
    """Who agrees with this user on such an arm?"""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"user_id": "ada", "features": SENCHA["features"], "limit": 10}]}
    )

    user_id: Identifier = Field(description="Who it is about; a user never seen is answered as a new one.")
    features: FeaturesIn = Field(description="The arm, as in POST /recommend.")
    context: FeaturesIn | None = Field(default=None, description="The moment, as in POST /recommend.")
    limit: int = Field(default=MEMBERS_LISTED, ge=1, le=MEMBERS_MAX, description="Members to list, the nearest.")


@final
class TransferRequest(RequestModel):
    """Who helps this target?"""

    model_config = ConfigDict(
        json_schema_extra={"examples": [example["value"] for example in TRANSFER_EXAMPLES.values()]}
    )

    user_id: Identifier | None = Field(default=None, description="The target: a user. Or `cluster`.")
    cluster: int | None = Field(
        default=None, ge=0, le=CLUSTER_MAX, description="The target: all users of a cluster. Or `user_id`."
    )
    sources: list[Identifier] | None = Field(
        default=None,
        min_length=SOURCES_MIN,
        max_length=SOURCES_MAX,
        description="Users who may help, each by themself. Left out: every other cluster.",
    )
    metric: MetricName = Field(
        default="mse",
        description="What the target loses, on rewards that no model saw. Those that compare groups "
        "(`worst-group-accuracy`, `demographic-parity`, `equal-opportunity`) compare the users of a target cluster.",
    )
