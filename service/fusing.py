"""Fusion as admins see it: what there is, what its guard found, how its training is doing; and asking for one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, final

from models.presets import build_learner
from models.settings import stored_settings
from models.warm_starts import GuardReport
from service.breaker import StoreBreaker
from service.errors import FusionUnavailable
from service.live import LiveSettings
from service.records import now_ms
from service.serving import ServingRoom
from store.errors import CorruptRecord
from store.fusion import FusionJob, FusionRecord, FusionStore

#: What is said of each verdict, after what was found.
FOLLOWS: Final = {
    "fusion": "New users with a profile begin from what is fused.",
    "blend": "New users with a profile begin between the prior and what is fused.",
    "prior": "That is not enough: all new users begin from the prior.",
}


@final
@dataclass(frozen=True, slots=True)
class FusionView:
    """The newest fusion model of a namespace, and the job that trains the next one."""

    #: Whether the namespace's learner takes warm starts at all.
    available: bool
    setting: Literal["auto", "off"]
    #: None while there is no fusion model.
    record: FusionRecord | None
    guard: GuardReport | None
    #: The version that starts users in this process.
    served: int | None
    #: Numbers of a profile; None until a request brings one.
    profile_size: int | None
    job: FusionJob


@final
class FusionDesk:
    """Answers for the fusion of one namespace."""

    def __init__(self, live: LiveSettings, breaker: StoreBreaker, fusion: FusionStore, room: ServingRoom) -> None:
        self._live = live
        self._breaker = breaker
        self._fusion = fusion
        self._room = room

    @property
    def _available(self) -> bool:
        # Whether it takes any does not depend on its inputs.
        return build_learner(stored_settings(self._live.record.learner), 1).start_size > 0

    async def describe(self) -> FusionView:
        """What there is."""
        return await self._breaker.call(self._describe)

    async def _describe(self) -> FusionView:
        record, guard, job = None, None, FusionJob()
        with suppress(CorruptRecord):  # the log tells of it
            record = await self._fusion.current()
        with suppress(CorruptRecord):
            job = await self._fusion.job()
        if record is not None:
            with suppress(TypeError):
                guard = GuardReport.from_json(record.report)
        layout, serving = self._live.record.profile_layout, self._room.serving
        return FusionView(
            available=self._available,
            setting=self._live.settings.fusion,
            record=record,
            guard=guard,
            served=None if serving is None else serving.fusion.version,
            profile_size=None if layout is None else layout["arm"],
            job=job,
        )

    async def request(self) -> FusionJob:
        """Have a worker train fusion; the job that holds, an earlier one while that waits or is under way."""
        if not self._available:
            raise FusionUnavailable("The learner of this namespace takes no warm starts: the preset `default` does.")
        if self._live.settings.fusion == "off":
            raise FusionUnavailable("Fusion is off here: set `fusion` to auto with PATCH /admin/config first.")
        return await self._breaker.call(lambda: self._fusion.request(now_ms()))


def told(guard: GuardReport) -> str:
    """What the guard found, in words."""
    better = "better" if guard.gain > 0 else "worse"
    return (
        f"The first rewards of {guard.held_out} users held out were foretold by their profiles {abs(guard.gain):.3g} ± "
        f"{guard.gain_error:.2g} nats a user {better} than by the meta-learner's prior. {FOLLOWS[guard.verdict]}"
    )
