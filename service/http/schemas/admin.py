"""Request bodies of POST /admin/groups and POST /admin/transfer."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, final

from pydantic import ConfigDict, Field

from metaban.service.http.schemas.examples import SENCHA, TRANSFER_EXAMPLES
from metaban.service.http.schemas.fields import FeaturesIn, Identifier, RequestModel
from metaban.store.shared.transfer import SOURCES_MAX, SOURCES_MIN

#: Members of a group that are listed: by default, and at most.
MEMBERS_LISTED: Final = 100
MEMBERS_MAX: Final = 1_000

#: Largest number of a cluster; no learner has more clusters.
CLUSTER_MAX: Final = 1_000_000

#: The metrics of `metaban.models.transfer.metrics`.
MetricName: TypeAlias = Literal[
    "mse", "cross-entropy", "margin", "worst-group-accuracy", "demographic-parity", "equal-opportunity"
]


@final
class GroupRequest(RequestModel):
    """A user and an arm whose group is asked for."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"user_id": "ada", "features": SENCHA["features"], "limit": 10}]}
    )

    user_id: Identifier = Field(description="The user. An unknown user is treated as a new one.")
    features: FeaturesIn = Field(description="Features of the arm, as in POST /recommend.")
    context: FeaturesIn | None = Field(default=None, description="Context, as in POST /recommend.")
    limit: int = Field(default=MEMBERS_LISTED, ge=1, le=MEMBERS_MAX, description="Members to list, nearest first.")


@final
class TransferRequest(RequestModel):
    """A target, and the sources that may help it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [example["value"] for example in TRANSFER_EXAMPLES.values()]}
    )

    user_id: Identifier | None = Field(default=None, description="Target: a user. Either this or `cluster`.")
    cluster: int | None = Field(
        default=None, ge=0, le=CLUSTER_MAX, description="Target: all users of a cluster. Either this or `user_id`."
    )
    sources: list[Identifier] | None = Field(
        default=None,
        min_length=SOURCES_MIN,
        max_length=SOURCES_MAX,
        description="Users as sources. Left out: all other clusters are the sources.",
    )
    metric: MetricName = Field(
        default="mse",
        description="Loss of the target on held-out rewards. `worst-group-accuracy`, `demographic-parity` and "
        "`equal-opportunity` compare the users of a cluster and need one as the target.",
    )
