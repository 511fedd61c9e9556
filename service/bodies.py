"""More of what clients send, beside `service.schemas`, and as strict."""

from __future__ import annotations

from typing import Annotated, Any, Final, final

from pydantic import ConfigDict, Field, WithJsonSchema

from service.schemas import FeaturesIn, Identifier, RequestModel

#: Requests in one batch.
MAX_REQUESTS: Final = 100
#: Members listed, unless asked for more or fewer, and at most.
MEMBERS_LISTED: Final = 100
MEMBERS_MAX: Final = 1_000


@final
class RecommendBatch(RequestModel):
    """Many requests at once."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "requests": [
                        {
                            "user_id": "u-42",
                            "arms": [
                                {"id": "espresso", "features": {"price": 2.4, "kind": "coffee"}},
                                {"id": "sencha", "features": {"price": 3.1, "kind": "tea"}},
                            ],
                            "decision_id": "order-1001",
                        },
                        {"user_id": "u-43", "arm_ids": ["espresso", "mocha"]},
                    ]
                }
            ]
        }
    )

    # Each is validated by itself: what is wrong with one is no matter of the others.
    requests: list[Annotated[Any, WithJsonSchema({"$ref": "#/components/schemas/RecommendRequest"})]] = Field(
        min_length=1, max_length=MAX_REQUESTS, description="As POST /recommend takes them."
    )


@final
class GroupRequest(RequestModel):
    """Who agrees with this user on such an arm?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"user_id": "u-42", "features": {"price": 3.1, "kind": "tea"}, "context": {"hour": 8}, "limit": 10}
            ]
        }
    )

    user_id: Identifier = Field(description="Who it is about; a user never seen is answered as a new one.")
    features: FeaturesIn = Field(description="The arm, as in POST /recommend.")
    context: FeaturesIn | None = Field(default=None, description="The moment, as in POST /recommend.")
    limit: int = Field(default=MEMBERS_LISTED, ge=1, le=MEMBERS_MAX, description="Members to list, the nearest.")
