"""The JSON of explanations, as OpenAPI shows it."""

from __future__ import annotations

from typing import final

from pydantic import BaseModel, Field


@final
class ContributionOut(BaseModel):
    """What one feature adds to the mean."""

    feature: str = Field(
        description="As it was sent: a name, `name=value` of a string, `arm[3]` or `context[0]` of lists, and "
        "`a × b` of products. Names that were hashed to one place are joined by ` | `.",
        examples=["kind=tea"],
    )
    value: float = Field(description="What the learner saw of it.")
    contribution: float = Field(description="Its value times the slope of the mean along it.")


@final
class ExplanationOut(BaseModel):
    """Who agrees about an arm, and what its mean is made of.

    `contributions`, `intercept`, `memory` and `other` add up to `mean`.
    """

    group_size: int
    pool_size: int = Field(description="Users compared, the asking one among them.")
    agreement: float = Field(description="The share of them that is in the group.")
    members_mean: float = Field(description="Mean of what the members of the group expect of the arm.")
    members_spread: float = Field(description="Standard deviation of it.")
    mean: float
    bonus: float
    sigma: float = Field(description="Standard deviation of the mean: how little is known of it.")
    contributions: list[ContributionOut] = Field(description="The ten largest that are not 0, the largest first.")
    intercept: float = Field(description="What is expected whatever the features.")
    memory: float = Field(description="Added for what the user earned on nearly the same arms before.")
    other: float = Field(description="The rest: smaller contributions, and what is not linear in the features.")
