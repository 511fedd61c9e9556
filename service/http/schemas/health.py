"""Responses of GET /health/live and /health/ready."""

from __future__ import annotations

from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field

from metaban.service.telemetry.metrics import WarningCode


@final
class CheckOut(BaseModel):
    """Result of one readiness check."""

    ok: bool
    detail: str


@final
class WarningOut(BaseModel):
    """Why a namespace cannot learn, and what to do."""

    namespace: str
    code: WarningCode
    detail: str


@final
class LiveResponse(BaseModel):
    """The process answers."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "live", "version": "0.1.0"}]})

    status: Literal["live"] = "live"
    version: str


@final
class ReadyResponse(BaseModel):
    """Whether requests can be sent here, and the checks."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "status": "ready",
                    "checks": {
                        "store": {"ok": True, "detail": "answers"},
                        "replica": {"ok": True, "detail": "follows the updates"},
                    },
                    "warnings": [],
                }
            ]
        }
    )

    status: Literal["ready", "degraded", "not ready"] = Field(
        description="`degraded`: recommendations are answered from memory and not recorded, rewards are refused."
    )
    checks: dict[str, CheckOut]
    warnings: list[WarningOut] = Field(
        description="Namespaces that cannot learn from their rewards, as seen by this process. Requests are answered "
        "all the same, so a warning does not change `status`."
    )
