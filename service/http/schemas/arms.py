"""Bodies with arms: of POST /recommend, of the catalogue, and lines of an import."""

from __future__ import annotations

from typing import Any, final

from pydantic import ConfigDict, Field

from metaban.service.http.schemas.examples import SENCHA
from metaban.service.http.schemas.fields import FeaturesIn, Identifier, RequestModel


@final
class ArmIn(RequestModel):
    """One arm to choose from."""

    model_config = ConfigDict(json_schema_extra={"examples": [SENCHA]})

    id: Identifier = Field(description="Id of the arm in the answer and in its rewards.", examples=["sencha"])
    features: FeaturesIn = Field(
        description="Features of the arm: a list of numbers, of the same length in every arm, or an object of named "
        "values, which are hashed."
    )


@final
class ArmFeaturesIn(RequestModel):
    """Features of the arm in the path."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"features": SENCHA["features"]}]})

    features: FeaturesIn


@final
class ArmLine(RequestModel):
    """One line of an import. Other members of an export are accepted and ignored."""

    id: Identifier
    features: FeaturesIn
    version: Any = None
    updated_ms: Any = None
