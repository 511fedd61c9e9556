"""Decisions: what was recommended, kept while rewards may come; the first writer of a decision id wins.

A deferred decision counts only once it is activated, and then from that moment on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha1
from typing import Any, Final, final

import numpy as np

from store.awaiting import Awaited
from store.codec import FLOAT32, decode_tensors, encode_tensors
from store.connection import Argument, Command, Store, as_bytes, as_int, command, pipeline
from store.decision_index import DECISIONS_READ, DecisionIndex
from store.errors import CorruptRecord, FenceLost, StoreError, StoreReset, StoreUnavailable
from store.keys import NamespaceKeys
from store.scripts import load_script
from store.starts import Start

#: The policy of decisions that no learner made, and none learns from.
BASELINE: Final = "baseline"
#: How long after its rewards are overdue a decision is still there for a worker that comes late.
OVERDUE_GRACE_MS: Final = 3_600_000
log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class DecidedItem:
    """One chosen arm, and how likely it was to be chosen at its rank (1 is the first)."""

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
class OpenDecision:
    """A decision that still takes rewards, and until when."""

    decision_id: str
    expires_ms: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One answer: the arms in order, and the input each was chosen on."""

    decision_id: str
    user_id: str
    fingerprint: str  # hex digest of the request body
    items: tuple[DecidedItem, ...]
    features: np.ndarray  # float32 [k, d]: one row an item
    phi: np.ndarray  # float32 [k, q]: what the learner noted of each item when it decided
    policy: str
    epoch: int
    user_version: int
    cold_start: str | None
    created_ms: int
    incarnation: int = 0  # of the user when it was decided: its rewards count for no other
    deferred: bool = False
    activated_ms: int | None = None  # of a deferred one; None until then

    @property
    def active(self) -> bool:
        """Whether it counts: rewards may come."""
        return not self.deferred or self.activated_ms is not None

    @property
    def since_ms(self) -> int:
        """When it began to count; of one that does not yet, when it was made."""
        return self.created_ms if self.activated_ms is None else self.activated_ms

    def open_until_ms(self, window_ms: int) -> int:
        """Until when it takes rewards, or can be activated, if that is so long since it began to count."""
        return self.since_ms + window_ms

    @property
    def awaited(self) -> list[Awaited]:
        """The arms that rewards may be learned for."""
        return [] if self.policy == BASELINE else [Awaited(self.decision_id, item.rank) for item in self.items]

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
    def decode(blob: bytes) -> Decision:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["decision"])
            cold_start, activated_ms = fields["cold_start"], fields.get("activated_ms")
            decision = Decision(
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
            raise CorruptRecord(f"not a decision: {error!r}") from error
        for tensor in (decision.features, decision.phi):
            if tensor.dtype != FLOAT32 or tensor.ndim != 2 or len(tensor) != len(decision.items):
                raise CorruptRecord("the features of a decision do not match its items")
        return decision


@final
class DecisionStore:
    """The decisions of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, *, ttl_s: float, store_epoch: str = "") -> None:
        """With a store epoch nothing is stored in another store, or in a namespace that was deleted."""
        if ttl_s <= 0:
            raise ValueError("decisions must be kept for some time")
        self._redis = redis
        self._keys = keys
        self._ttl_ms = max(1, round(ttl_s * 1_000))
        self._index = DecisionIndex(redis, keys, store_epoch)
        self._decide = load_script(redis, "decide")
        self._activate = load_script(redis, "activate")
        self._note = load_script(redis, "note")

    async def put(
        self, decision: Decision, *, overdue_ms: int | None = None, profile: bytes = b"", start: Start | None = None
    ) -> Decision:
        """Store a decision unless its id is taken; the decision that holds, of whoever came first.

        With `overdue_ms` its arms wait for rewards until then, see `store.awaiting`. With it goes the profile of the
        user, if that has to be written, and the start that it was decided by, which counts unless they have one or
        something was learned of them. FenceLost, with nothing stored and the incarnation that the user is in, when
        they began anew since it was decided: it is of no use to them, and would outlive them if they were forgotten.
        StoreReset, with nothing stored either, when the namespace is gone.
        """
        user_id, decision_id, record = decision.user_id, decision.decision_id, decision.encode()
        if start is not None and start.incarnation != decision.incarnation:
            raise ValueError("a start is of the incarnation that was decided for")
        noted = self._index.note(
            user_id,
            decision.incarnation,
            decision_id,
            ttl_ms=self._kept_ms(decision, overdue_ms),
            profile=profile,
            start=b"" if start is None else start.encode(),
        )
        try:
            stored, current = await self._note.call_after(self._storing(decision, record, overdue_ms), *noted)
        except StoreUnavailable:
            # Stored where the note could not be, which another server takes: nobody would find it.
            with suppress(StoreError):
                await self._index.retract(decision_id, record)
            raise
        standing = decision if stored is None else Decision.decode(as_bytes(stored))
        if standing.user_id != user_id:
            await self._index.unnote(user_id, decision_id)
        elif standing.incarnation != as_int(current):
            await self._index.retract(decision_id, record if stored is None else as_bytes(stored))
            self._check_noted(as_int(current))
            raise FenceLost("incarnation", str(as_int(current)))
        return standing

    def _check_noted(self, incarnation: int) -> None:
        if incarnation < 0:
            raise StoreReset(f"namespace {self._keys.namespace} was deleted, or vanished with its store")

    def _storing(self, decision: Decision, record: bytes, overdue_ms: int | None) -> Command:
        """What stores a decision, and has it wait for rewards."""
        if overdue_ms is None:
            return ("SET", self._keys.decision(decision.decision_id), record, "NX", "GET", "PX", self._ttl_ms)
        arguments = [record, *self._waiting_arguments(decision, overdue_ms)]
        return self._decide.inline(self._waiting_keys(decision), arguments)

    async def activate(
        self, decision_id: str, now_ms: int, *, window_ms: int, overdue_ms: int | None = None
    ) -> Decision | None:
        """Have a deferred decision count from now on, and keep it as long as one made now.

        The decision that holds: one that is active stays as it is. None when it is gone, or was made more than
        `window_ms` ago.
        """
        while True:
            stored = await command(self._redis, "GET", self._keys.decision(decision_id))
            decision = None if stored is None else Decision.decode(as_bytes(stored))
            if decision is None or decision.active:
                return decision
            if now_ms - decision.created_ms > window_ms:
                return None
            activated = replace(decision, activated_ms=now_ms)
            # Noted for longer before it is kept for longer: broken off in between, nobody misses it who is forgotten.
            if not await self._note_anew(activated, overdue_ms):
                return None
            read = sha1(as_bytes(stored), usedforsecurity=False).hexdigest()
            arguments = [read, activated.encode(), *self._waiting_arguments(activated, overdue_ms)]
            if await self._activate.call(self._waiting_keys(activated), arguments):
                return activated
            # Somebody else was first, or it has just gone: the next look tells.

    async def _note_anew(self, decision: Decision, overdue_ms: int | None) -> bool:
        """Note a decision that will be kept longer than was noted; False when its user began anew since."""
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

    def _kept_ms(self, decision: Decision, overdue_ms: int | None) -> int:
        """How long a decision is kept: as long as rewards may come, and until it is seen to that none came."""
        return (
            self._ttl_ms if overdue_ms is None else max(self._ttl_ms, overdue_ms - decision.since_ms + OVERDUE_GRACE_MS)
        )

    def _waiting_keys(self, decision: Decision) -> list[str]:
        partition = self._keys.partition_of(decision.decision_id)
        return [self._keys.decision(decision.decision_id), self._keys.awaiting(partition)]

    def _waiting_arguments(self, decision: Decision, overdue_ms: int | None) -> list[Argument]:
        """How long a decision is kept, and who waits until when."""
        if overdue_ms is None:
            return [self._ttl_ms, 0]
        return [self._kept_ms(decision, overdue_ms), overdue_ms, *(each.encode() for each in decision.awaited)]

    async def get(self, decision_id: str) -> Decision | None:
        """A decision that is still kept; its reward window may be over."""
        stored = await command(self._redis, "GET", self._keys.decision(decision_id))
        return None if stored is None else Decision.decode(as_bytes(stored))

    async def load(self, decision_ids: Iterable[str]) -> dict[str, Decision]:
        """Those of these decisions that are still kept, without any that are damaged."""
        ids = list(dict.fromkeys(decision_ids))
        replies = await pipeline(self._redis, [("GET", self._keys.decision(each)) for each in ids])
        found: dict[str, Decision] = {}
        for decision_id, stored in zip(ids, replies, strict=True):
            try:
                if stored is not None:
                    found[decision_id] = Decision.decode(as_bytes(stored))
            except CorruptRecord as error:
                log.error("decision %r cannot be read: %s", decision_id, error)
        return found

    async def open_of(self, user_id: str, now_ms: int, *, window_ms: int, most: int) -> list[OpenDecision]:
        """The decisions of a user that still take rewards, or will once they are activated: the newest first, of the
        newest so many that are kept."""
        ids = await self._index.newest(user_id, most=most)
        found: list[OpenDecision] = []
        for start in range(0, len(ids), DECISIONS_READ):
            for decision in (await self.load(ids[start : start + DECISIONS_READ])).values():
                until_ms = decision.open_until_ms(window_ms)
                # Of another user where a process was killed before it took back the note.
                if decision.user_id == user_id and decision.awaited and now_ms <= until_ms:
                    found.append(OpenDecision(decision.decision_id, until_ms))
        return found

    async def keeps_any_of(self, user_id: str) -> bool:
        """Whether a decision of a user is kept, be it too late for rewards."""
        return await self._index.count(user_id, lambda record: _is_of(record, user_id, None)) > 0

    async def count_of(self, user_id: str, incarnation: int) -> int:
        """How many decisions there are of earlier incarnations of a user."""
        return await self._index.count(user_id, lambda record: _is_of(record, user_id, incarnation))

    async def forget_of(self, user_id: str, incarnation: int) -> int:
        """Delete the decisions of earlier incarnations of a user; how many there were."""
        return await self._index.retract_all(user_id, lambda record: _is_of(record, user_id, incarnation))

    async def rehearse(self) -> None:
        """Ask for a write that changes nothing, no decision having an empty id; refused whenever a write would be."""
        await command(self._redis, "SET", self._keys.decision(""), b"", "XX")


def _is_of(record: bytes, user_id: str, before: int | None) -> bool:
    """Whether a decision is a user's, and of an incarnation before this one if any is named; one that cannot be read
    is of no use to anybody."""
    try:
        decision = Decision.decode(record)
    except CorruptRecord:
        return True
    return decision.user_id == user_id and (before is None or decision.incarnation < before)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptRecord(f"expected text in a decision, got {type(value).__name__}")
    return value
