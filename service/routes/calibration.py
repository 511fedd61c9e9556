"""GET /admin/calibration: whether predictions come true."""

from __future__ import annotations

from typing import Final, final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from models.calibration import BINS, Reliability
from service.auth import AdminEngine
from service.errors import Forbidden, Unauthorized
from service.openapi import problem_responses

router = APIRouter(tags=["administration"])

BIN_EXAMPLE: Final[JsonDict] = {
    "low": 0.4,
    "high": 0.5,
    "samples": 310,
    "predicted": 0.448,
    "reward": 0.461,
    "coverage": 0.9,
}


@final
class BinOut(BaseModel):
    """Decisions whose reward was predicted to lie between `low` and `high`."""

    low: float
    high: float
    samples: int
    predicted: float = Field(description="Mean of what was predicted.")
    reward: float = Field(description="Mean of the rewards.")
    coverage: float = Field(description="Share of the rewards inside their 90 % interval.")


@final
class ReliabilityOut(BaseModel):
    """Predictions noted when decisions were made, against the rewards since."""

    samples: int = Field(description="Rewards that were compared: the newest since tastes last changed.")
    ece: float = Field(
        description="Expected calibration error: how far mean prediction and mean reward of a bin are apart, over all."
    )
    mce: float | None = Field(
        description="The largest of these distances, over bins of 50 samples or more; null when there is none."
    )
    coverage: float = Field(description="Share of the rewards inside their 90 % interval.")
    bins: list[BinOut] = Field(description="By what was predicted, lowest first; those without samples are left out.")


@final
class CalibrationOut(BaseModel):
    """How reliable predictions are."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model_version": 7,
                    "calibration": {
                        "samples": 4200,
                        "ece": 0.021,
                        "mce": 0.048,
                        "coverage": 0.91,
                        "bins": [BIN_EXAMPLE],
                    },
                }
            ]
        }
    )

    model_version: int = Field(description="The served epoch, which this was worked out with.")
    calibration: ReliabilityOut | None = Field(
        description="null before the first rewards are learned, and of presets that note no predictions."
    )


@router.get(
    "/admin/calibration",
    summary="Do predictions come true?",
    responses=problem_responses(Unauthorized, Forbidden),
)
async def show(engine: AdminEngine) -> CalibrationOut:
    """Calibration of predicted rewards and of their 90 % intervals, as of the epoch served by the process that answers:
    what was noted when decisions were made against the rewards since, never what the learner would say now."""
    version, found = engine.calibration
    return CalibrationOut(model_version=version, calibration=None if found is None else _shown(found))


def _shown(found: Reliability) -> ReliabilityOut:
    bins = [
        BinOut(
            low=place / BINS,
            high=(place + 1) / BINS,
            samples=round(count),
            predicted=predicted / count,
            reward=reward / count,
            coverage=inside / count,
        )
        for place, (count, predicted, reward, inside) in enumerate(found.table.tolist())
        if count
    ]
    return ReliabilityOut(samples=found.count, ece=found.ece, mce=found.mce, coverage=found.coverage, bins=bins)
