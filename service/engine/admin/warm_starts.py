"""Admin: the fusion model that makes warm starts, its guard, and its training job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, final

from metaban.models.fusion.warm_starts import GuardReport
from metaban.models.presets import build_learner
from metaban.models.settings import stored_settings
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.errors import FusionUnavailable
from metaban.service.settings.namespace import LiveSettings
from metaban.store.codec import now_ms
from metaban.store.errors import CorruptRecord
from metaban.store.shared.fusion import FusionJobRecord, FusionRecord, FusionStore

#: What each verdict of the guard means.
VERDICTS: Final = {
    "fusion": "New users with a profile begin from their warm start.",
    "blend": "New users with a profile begin between the prior and their warm start.",
    "prior": "This is not enough: all new users begin from the prior.",
}


@final
@dataclass(frozen=True, slots=True)
class FusionView:
    """The newest fusion model of a namespace, and the job that trains the next one."""

    #: Whether the namespace's learner supports warm starts.
    available: bool
    setting: Literal["auto", "off"]
    #: None while there is no fusion model.
    record: FusionRecord | None
    guard: GuardReport | None
    #: The version served by this process.
    served: int | None
    #: Length of a profile vector; None until a request has a profile.
    profile_size: int | None
    job: FusionJobRecord


@final
class FusionAdmin:
    """Shows and trains the fusion model of one namespace."""

    def __init__(self, live: LiveSettings, guard: StoreGuard, fusion: FusionStore, host: ModelHost) -> None:
        self._live = live
        self._guard = guard
        self._fusion = fusion
        self._host = host

    @property
    def _available(self) -> bool:
        # It does not depend on the number of inputs.
        return build_learner(stored_settings(self._live.record.learner), 1).start_size > 0

    async def describe(self) -> FusionView:
        """The fusion model and its training job."""
        return await self._guard.call(self._describe)

    async def _describe(self) -> FusionView:
        record, guard, job = None, None, FusionJobRecord()
        with suppress(CorruptRecord):  # the store has logged it
            record = await self._fusion.current()
        with suppress(CorruptRecord):
            job = await self._fusion.job()
        if record is not None:
            with suppress(TypeError):
                guard = GuardReport.from_json(record.report)
        layout, serving = self._live.record.profile_layout, self._host.serving
        return FusionView(
            available=self._available,
            setting=self._live.settings.fusion,
            record=record,
            guard=guard,
            served=None if serving is None else serving.fusion.version,
            profile_size=None if layout is None else layout["arm"],
            job=job,
        )

    async def request(self) -> FusionJobRecord:
        """Request the training of a fusion model; returns the job, an earlier one while that waits or runs."""
        if not self._available:
            raise FusionUnavailable(
                "The learner of this namespace does not support warm starts: use the preset `default`."
            )
        if self._live.settings.fusion == "off":
            raise FusionUnavailable("Fusion is off: set `fusion` to auto with PATCH /admin/config first.")
        return await self._guard.call(lambda: self._fusion.request(now_ms()))


def guard_summary(guard: GuardReport) -> str:
    """The guard's result in words."""
    better = "better" if guard.gain > 0 else "worse"
    return (
        f"Warm starts predicted the first rewards of {guard.held_out} held-out users {abs(guard.gain):.3g} ± "
        f"{guard.gain_error:.2g} nats per user {better} than the prior. {VERDICTS[guard.verdict]}"
    )
