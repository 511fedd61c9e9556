"""Decisions, kept while rewards may come. The first writer of a decision id wins.

A deferred decision counts from the moment it is activated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

import numpy as np
import structlog

from metaban.store.client.connection import Store, as_bytes, as_int, command, pipeline
from metaban.store.client.node import Argument, Command
from metaban.store.client.scripts import load_script
from metaban.store.codec import FLOAT32, decode_tensors, encode_tensors
from metaban.store.decisions.default_rewards import AwaitedReward
from metaban.store.decisions.index import DECISIONS_READ, DecisionIndex, record_digest
from metaban.store.errors import CorruptRecord, FenceLost, StoreError, StoreReset, StoreUnavailable
from metaban.store.keys import NamespaceKeys
from metaban.store.users.warm_starts import StoredWarmStart

#: Policy of decisions made without a learner; they are not learned from.
BASELINE: Final = "baseline"

#: Time that a decision is kept after its rewards are overdue, for late workers.
OVERDUE_GRACE_MS: Final = 3_600_000

#: Time that a decision is kept before it is in the index of its user, where forgetting finds it. If the process dies in
#: between, the decision expires.
UNNOTED_MS: Final = 10_000

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
@dataclass(frozen=True, slots=True)
class DecidedItem:
    """One chosen arm with its rank (from 1), scores and propensity."""

    arm_id: str
    rank: int
    score: float
    mean: float
    bonus: float
    propensity: float
    group_size: int

    @staticmethod
    def decode(fields: dict[str, Any]) -> DecidedItem:
        return DecidedItem(
            arm_id=_text(fields["arm_id"]),
            rank=as_int(fields["rank"]),
            score=float(fields["score"]),
            mean=float(fields["mean"]),
            bonus=float(fields["bonus"]),
            propensity=float(fields["propensity"]),
            group_size=as_int(fields["group_size"]),
        )


@final
@dataclass(frozen=True, slots=True)
class OpenDecisionRecord:
    """A decision that still accepts rewards, until `expires_ms`."""

    decision_id: str
    expires_ms: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class DecisionRecord:
    """One decision: the chosen arms in order, and the input of each."""

    decision_id: str
    user_id: str
    fingerprint: str  # hex digest of the request body
    items: tuple[DecidedItem, ...]
    features: np.ndarray  # float32 [k, d]: one row per item
    phi: np.ndarray  # float32 [k, q]: the learner's features of each item at decision time
    policy: str
    epoch: int
    user_version: int
    cold_start: str | None
    created_ms: int
    incarnation: int = 0  # of the user at decision time; its rewards count for this one only
    deferred: bool = False
    activated_ms: int | None = None  # of a deferred decision; None before activation

    @property
    def active(self) -> bool:
        """Whether it accepts rewards."""
        return not self.deferred or self.activated_ms is not None

    @property
    def since_ms(self) -> int:
        """Time of activation, or of the decision if it is not deferred or not yet activated."""
        return self.created_ms if self.activated_ms is None else self.activated_ms

    def open_until_ms(self, window_ms: int) -> int:
        """End of the reward window; before activation, end of the time in which it can be activated."""
        return self.since_ms + window_ms

    @property
    def awaited(self) -> list[AwaitedReward]:
        """Arms whose rewards can be learned."""
        return [] if self.policy == BASELINE else [AwaitedReward(self.decision_id, item.rank) for item in self.items]

    def encode(self) -> bytes:
        tensors = {
            "features": np.asarray(self.features, dtype=FLOAT32),
            "phi": np.asarray(self.phi, dtype=FLOAT32),
        }
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or len(tensor) != len(self.items):
                raise ValueError(f"{len(self.items)} items need as many rows, not {name} of shape {tensor.shape}")
        fields = {
            "decision_id": self.decision_id,
            "user_id": self.user_id,
            "fingerprint": self.fingerprint,
            "items": [asdict(item) for item in self.items],
            "policy": self.policy,
            "epoch": self.epoch,
            "user_version": self.user_version,
            "cold_start": self.cold_start,
            "created_ms": self.created_ms,
            "incarnation": self.incarnation,
            "deferred": self.deferred,
            "activated_ms": self.activated_ms,
        }
        return encode_tensors(tensors, {"decision": json.dumps(fields, allow_nan=False)})

    @staticmethod
    def decode(blob: bytes) -> DecisionRecord:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["decision"])
            cold_start, activated_ms = fields["cold_start"], fields.get("activated_ms")
            decision = DecisionRecord(
                decision_id=_text(fields["decision_id"]),
                user_id=_text(fields["user_id"]),
                fingerprint=_text(fields["fingerprint"]),
                items=tuple(DecidedItem.decode(item) for item in fields["items"]),
                features=tensors["features"],
                phi=tensors["phi"],
                policy=_text(fields["policy"]),
                epoch=as_int(fields["epoch"]),
                user_version=as_int(fields["user_version"]),
                cold_start=None if cold_start is None else _text(cold_start),
                created_ms=as_int(fields["created_ms"]),
                incarnation=as_int(fields.get("incarnation", 0)),
                deferred=bool(fields.get("deferred", False)),
                activated_ms=None if activated_ms is None else as_int(activated_ms),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptRecord(f"not a decision: {type(error).__name__}") from error
        for tensor in (decision.features, decision.phi):
            if tensor.dtype != FLOAT32 or tensor.ndim != 2 or len(tensor) != len(decision.items):
                raise CorruptRecord("the features of a decision do not match its items")
        return decision


@final
class DecisionStore:
    """Decisions of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, *, ttl_s: float, store_id: str = "") -> None:
        """With a store id, nothing is stored in another store or in a deleted namespace."""
        self._redis = redis
        self._keys = keys
        self.set_ttl(ttl_s)
        self._index = DecisionIndex(redis, keys, store_id)
        self._keep = load_script(redis, "keep")
        self._activate = load_script(redis, "activate")
        self._note = load_script(redis, "note")

    def set_ttl(self, ttl_s: float) -> None:
        """Change how long decisions made from now on are kept."""
        if ttl_s <= 0:
            raise ValueError("ttl_s must be positive")
        self._ttl_ms = max(1, round(ttl_s * 1_000))

    async def put(
        self,
        decision: DecisionRecord,
        *,
        overdue_ms: int | None = None,
        profile: bytes = b"",
        start: StoredWarmStart | None = None,
    ) -> DecisionRecord:
        """Store a decision unless its id is taken. Returns the stored decision, which may be that of another request.

        With `overdue_ms` its arms wait for rewards until then (`default_rewards`). `profile` is written with it if it
        is not empty, and `start` unless the user has a warm start or applied rewards. Raises FenceLost with the user's
        current incarnation, and stores nothing, if that changed since the decision: the decision would outlive a
        forgotten user. Raises StoreReset, and stores nothing, if the namespace is gone.
        """
        user_id, decision_id, record = decision.user_id, decision.decision_id, decision.encode()
        if start is not None and start.incarnation != decision.incarnation:
            raise ValueError("the warm start must be of the incarnation of the decision")
        noted = self._index.note(
            user_id,
            decision.incarnation,
            decision_id,
            ttl_ms=self._kept_ms(decision, overdue_ms),
            profile=profile,
            start=b"" if start is None else start.encode(),
        )
        key, unnoted_ms = self._keys.decision(decision_id), min(UNNOTED_MS, self._ttl_ms)
        try:
            stored, current, kept = await self._note.call_between(
                ("SET", key, record, "NX", "GET", "PX", unnoted_ms),
                *noted,
                self._keeping(decision, record, overdue_ms),
                accepts=lambda current: as_int(current) == decision.incarnation,
            )
        except StoreError:
            # The decision may be stored without its index entry: forgetting the user would not find it.
            with suppress(StoreError):
                await self._index.retract(decision_id, record)
            raise
        standing = decision if stored is None else DecisionRecord.decode(as_bytes(stored))
        if standing is decision and kept == 0:
            # A forgetting deleted it since it was noted, or it expired before.
            current = await self._note.call(*noted)
            if as_int(current) == decision.incarnation:
                raise StoreUnavailable("the decision expired before it was in the index of its user")
        if standing.user_id != user_id:
            await self._index.unnote(user_id, decision_id)
        elif standing.incarnation != as_int(current):
            await self._index.retract(decision_id, record if stored is None else as_bytes(stored))
            self._check_noted(as_int(current))
            raise FenceLost("incarnation", str(as_int(current)))
        return standing

    def _check_noted(self, incarnation: int) -> None:
        if incarnation < 0:
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")

    def _keeping(self, decision: DecisionRecord, record: bytes, overdue_ms: int | None) -> Command:
        """Command that keeps a noted decision and, with `overdue_ms`, adds it to those waiting for rewards."""
        if overdue_ms is None:
            return ("PEXPIRE", self._keys.decision(decision.decision_id), self._ttl_ms)
        arguments = [record_digest(record), *self._waiting_arguments(decision, overdue_ms)]
        return self._keep.inline(self._waiting_keys(decision), arguments)

    async def activate(
        self, decision_id: str, now_ms: int, *, window_ms: int, overdue_ms: int | None = None
    ) -> DecisionRecord | None:
        """Activate a deferred decision, and keep it as long as one made now.

        Returns the stored decision, unchanged if it is active already; None if it is gone or was made more than
        `window_ms` ago.
        """
        while True:
            stored = await command(self._redis, "GET", self._keys.decision(decision_id))
            decision = None if stored is None else DecisionRecord.decode(as_bytes(stored))
            if decision is None or decision.active:
                return decision
            if now_ms - decision.created_ms > window_ms:
                return None
            activated = replace(decision, activated_ms=now_ms)
            # The index entry is extended first: if this is interrupted, forgetting the user still finds the decision.
            if not await self._extend_note(activated, overdue_ms):
                return None
            arguments = [
                record_digest(as_bytes(stored)),
                activated.encode(),
                *self._waiting_arguments(activated, overdue_ms),
            ]
            if await self._activate.call(self._waiting_keys(activated), arguments):
                return activated
            # Changed or deleted meanwhile: read it again.

    async def _extend_note(self, decision: DecisionRecord, overdue_ms: int | None) -> bool:
        """Extend the index entry of a decision; False if its user has a new incarnation."""
        noted = self._index.note(
            decision.user_id,
            decision.incarnation,
            decision.decision_id,
            ttl_ms=self._kept_ms(decision, overdue_ms),
            profile=b"",
        )
        current = as_int(await self._note.call(*noted))
        self._check_noted(current)
        return current == decision.incarnation

    def _kept_ms(self, decision: DecisionRecord, overdue_ms: int | None) -> int:
        """Time that a decision is kept: the reward window, and until its default rewards are sent."""
        return (
            self._ttl_ms if overdue_ms is None else max(self._ttl_ms, overdue_ms - decision.since_ms + OVERDUE_GRACE_MS)
        )

    def _waiting_keys(self, decision: DecisionRecord) -> list[str]:
        partition = self._keys.partition_of(decision.decision_id)
        return [self._keys.decision(decision.decision_id), self._keys.awaiting(partition)]

    def _waiting_arguments(self, decision: DecisionRecord, overdue_ms: int | None) -> list[Argument]:
        """Script arguments: time to live, time when rewards are overdue, members waiting for rewards."""
        if overdue_ms is None:
            return [self._ttl_ms, 0]
        return [self._kept_ms(decision, overdue_ms), overdue_ms, *(each.encode() for each in decision.awaited)]

    async def get(self, decision_id: str) -> DecisionRecord | None:
        """A stored decision; its reward window may be over."""
        stored = await command(self._redis, "GET", self._keys.decision(decision_id))
        return None if stored is None else DecisionRecord.decode(as_bytes(stored))

    async def standing(self, decision_id: str) -> DecisionRecord | None:
        """A stored decision that is in the index of its user; one that is not yet may still be retracted."""
        decision = await self.get(decision_id)
        return None if decision is None or not await self._index.has(decision.user_id, decision_id) else decision

    async def load(self, decision_ids: Iterable[str]) -> dict[str, DecisionRecord]:
        """Those of these decisions that are stored, without damaged ones."""
        ids = list(dict.fromkeys(decision_ids))
        found: dict[str, DecisionRecord] = {}
        for start in range(0, len(ids), DECISIONS_READ):  # in parts: decoding blocks the event loop
            part = ids[start : start + DECISIONS_READ]
            replies = await pipeline(self._redis, [("GET", self._keys.decision(each)) for each in part])
            for decision_id, stored in zip(part, replies, strict=True):
                try:
                    if stored is not None:
                        found[decision_id] = DecisionRecord.decode(as_bytes(stored))
                except CorruptRecord as error:
                    log.error("decision_damaged", namespace=self._keys.namespace, reason=str(error))
        return found

    async def open_of(self, user_id: str, now_ms: int, *, window_ms: int, most: int) -> list[OpenDecisionRecord]:
        """Decisions of a user that accept rewards, now or after activation, newest first, among the newest `most`."""
        found: list[OpenDecisionRecord] = []
        for decision in (await self.load(await self._index.newest(user_id, most=most))).values():
            until_ms = decision.open_until_ms(window_ms)
            # A process that was killed may have left an index entry for another user's decision.
            if decision.user_id == user_id and decision.awaited and now_ms <= until_ms:
                found.append(OpenDecisionRecord(decision.decision_id, until_ms))
        return found

    async def keeps_any_of(self, user_id: str) -> bool:
        """Whether any decision of a user is stored, even after its reward window."""
        return await self._index.count(user_id, lambda record: _is_of(record, user_id, None)) > 0

    async def count_of(self, user_id: str, incarnation: int) -> int:
        """Number of stored decisions of earlier incarnations of a user."""
        return await self._index.count(user_id, lambda record: _is_of(record, user_id, incarnation))

    async def forget_of(self, user_id: str, incarnation: int) -> int:
        """Delete the decisions of earlier incarnations of a user; returns their number."""
        return await self._index.retract_all(user_id, lambda record: _is_of(record, user_id, incarnation))

    async def rehearse(self) -> None:
        """Send a write that changes nothing, since no decision has an empty id; it fails whenever writes fail."""
        await command(self._redis, "SET", self._keys.decision(""), b"", "XX")


def _is_of(record: bytes, user_id: str, before: int | None) -> bool:
    """Whether a stored decision is of this user and, if given, of an incarnation before `before`.

    True for a damaged record, so that it is deleted.
    """
    try:
        decision = DecisionRecord.decode(record)
    except CorruptRecord:
        return True
    return decision.user_id == user_id and (before is None or decision.incarnation < before)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptRecord(f"expected text in a decision, got {type(value).__name__}")
    return value
