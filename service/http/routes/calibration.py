"""GET /admin/calibration: how well predicted rewards match the rewards received."""

from __future__ import annotations

from typing import Final, final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from metaban.models.default.calibration import BINS, ReliabilityTable
from metaban.service.errors import Forbidden, Unauthorized
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses

router = APIRouter(route_class=AuditedRoute, tags=["administration"])

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
    predicted: float = Field(description="Mean of the predictions.")
    reward: float = Field(description="Mean of the rewards received.")
    coverage: float = Field(description="Share of the rewards inside their 90 % interval.")


@final
class ReliabilityOut(BaseModel):
    """Predictions stored with decisions, compared with their rewards."""

    samples: int = Field(description="Rewards compared: the latest ones since the last detected change of preferences.")
    ece: float = Field(
        description="Expected calibration error: |mean prediction − mean reward| of each bin, averaged over samples."
    )
    mce: float | None = Field(
        description="Maximum calibration error: the largest difference in a bin of 50 samples or more; null if none."
    )
    coverage: float = Field(description="Share of the rewards inside their 90 % interval.")
    bins: list[BinOut] = Field(description="Bins of the predicted reward, lowest first; empty bins are left out.")


@final
class CalibrationOut(BaseModel):
    """Calibration of the predictions of a namespace."""

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

    model_version: int = Field(description="The served epoch, which these numbers belong to.")
    calibration: ReliabilityOut | None = Field(
        description="null before the first rewards are learned, and for presets that store no predictions."
    )


@router.get(
    "/admin/calibration",
    summary="Calibration of predictions",
    responses=problem_responses(Unauthorized, Forbidden),
)
async def show(engine: AdminEngine) -> CalibrationOut:
    """Calibration of predicted rewards and of their 90 % intervals, from the epoch that this process serves. The
    predictions are those made with the decisions; they are not computed again."""
    version, found = engine.calibration
    return CalibrationOut(model_version=version, calibration=None if found is None else _reliability(found))


def _reliability(found: ReliabilityTable) -> ReliabilityOut:
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
