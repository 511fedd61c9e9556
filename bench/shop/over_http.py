"""The shipped learner in the shop through HTTP: a real service with its worker, asked by the client."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

import httpx
import numpy as np

from metaban.bench.shop.inputs import named_context, named_features
from metaban.bench.shop.player import PlayerSettings, ShopPlayer, ShownItem
from metaban.bench.shop.shipped import ID_DIGITS
from metaban.bench.worlds.shop import Places, ShopCatalogue, ShopRequest
from metaban.client import Metaban
from metaban.service.process.local_deployment import Deployment

#: Longest time of one call, which may wait for rewards to be applied, and of all its tries.
CALL_TIMEOUT_S: Final = 60.0
CALL_DEADLINE_S: Final = 180.0

#: Longest wait for an epoch that is due, and pause between two looks.
EPOCH_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.02

EPOCH_DUE: Final = re.compile(r'^metaban_epoch_due\{namespace="default"\} (\S+)$', re.MULTILINE)


@final
class HttpPlayer(ShopPlayer):
    """`metaban serve` with default settings on a free port; the items are imported into its catalogue.

    Each reward is sent alone, and the next call waits until it is applied and no epoch is due: in a shop with seconds
    between two events the worker has learned all of them, as the player in one process does. Seed, users and ids of
    decisions are those of that player, so both draw the same numbers.
    """

    def __init__(self, catalogue: ShopCatalogue, *, seed: int) -> None:
        if catalogue.metadata is None or len(set(catalogue.identities.tolist())) < len(catalogue.identities):
            raise ValueError("items need ids and metadata to be imported into the catalogue of a service")
        self._ids = [f"{identity:0{ID_DIGITS}}" for identity in catalogue.identities.tolist()]
        self._places = {arm_id: place for place, arm_id in enumerate(self._ids)}
        self.settings: PlayerSettings = {"seed": seed}
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="metaban-"))
            service = opened.enter_context(Deployment(Path(folder), {"METABAN_SEED": str(seed)}))
            self._client = opened.enter_context(
                Metaban(service.url, timeout_s=CALL_TIMEOUT_S, deadline_s=CALL_DEADLINE_S)
            )
            self._metrics = opened.enter_context(httpx.Client(base_url=service.url, timeout=CALL_TIMEOUT_S))
            described = zip(self._ids, catalogue.metadata, strict=True)
            job = self._client.admin.arms.import_lines({arm_id: named_features(item) for arm_id, item in described})
            self._client.admin.wait_for_job(job.id)
            self._opened = opened.pop_all()

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        allowed = set(eligible.tolist())
        decision = self._client.recommend(
            f"user-{request.user}",
            exclude=[arm_id for place, arm_id in enumerate(self._ids) if place not in allowed],
            k=size,
            context=named_context(request),
            decision_id=str(request.number),
        )
        return np.array([self._places[item.arm_id] for item in decision.items])

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            decision, arm_id = str(shown.request.number), self._ids[shown.item]
            result = self._client.feedback(decision, shown.reward, arm_id=arm_id, wait_applied=True)
            if not (result.accepted and result.applied):
                raise RuntimeError(f"the reward of {arm_id} in slate {decision} was not applied: {result}")
            self._wait_for_epoch()

    def _wait_for_epoch(self) -> None:
        """Wait until the epoch that the applied rewards make due is served, if there is one."""
        deadline = time.monotonic() + EPOCH_TIMEOUT_S
        while self._epoch_due():
            if time.monotonic() > deadline:
                raise RuntimeError(f"an epoch is due, and was not served within {EPOCH_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def _epoch_due(self) -> bool:
        answer = self._metrics.get("/metrics").raise_for_status()
        found = EPOCH_DUE.search(answer.text)
        if found is None:
            raise RuntimeError("the service's metrics have no metaban_epoch_due")
        return float(found[1]) > 0

    def close(self) -> None:
        self._opened.close()
