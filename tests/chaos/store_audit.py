"""Reads the store, where possible without the code that wrote it, and compares it with the events that clients sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast, final

import numpy as np
import redis
import torch

from metaban.models.features import FeatureLayout
from metaban.models.presets import build_learner
from metaban.models.settings import stored_settings
from metaban.store.codec import Sample
from metaban.store.keys import LEARNERS, NamespaceKeys
from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared.epochs import Epoch
from metaban.store.users.records import UserState
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.chaos.clients import SentEvents
from tests.chaos.deployment import WAIT_TIMEOUT_S, WaitTimeout, wait_until

#: Tolerance for float32 sums in another order.
TOLERANCE = 1e-4
#: Prefix of the ids of events that tests write directly into a stream.
FOREIGN = b"foreign"


@final
@dataclass
class User:
    """A user in the store."""

    user_id: str
    standing: tuple[int, int] | None = None  # (incarnation, version) as `versions` says
    state: UserState | None = None
    samples: list[Sample] = field(default_factory=list)
    #: Forgotten: only the incarnation is left.
    tombstone: bool = False


@final
@dataclass
class StoreContents:
    """Contents of the store."""

    record: NamespaceRecord | None
    users: dict[str, User]
    waiting: dict[str, bytes]  # arm id of each event in a stream → its entry id; foreign entries by their id
    pending: int
    attempts: int
    dead: list[dict[bytes, bytes]]
    counters: dict[str, int]
    epoch: Epoch | None
    epoch_number: int | None
    epoch_log: list[int]
    problems: list[str] = field(default_factory=list)

    @property
    def versions(self) -> int:
        return sum(user.standing[1] for user in self.users.values() if user.standing)

    @property
    def effective(self) -> int:
        """Applied events of users who were not forgotten since."""
        return self.counters.get("applied", 0) - self.counters.get("forgotten", 0)


@final
@dataclass
class Findings:
    """Result of an audit."""

    acknowledged: int = 0
    applied: int = 0
    lost: int = 0
    twice: int = 0
    valid_dead_letters: int = 0
    excused: int = 0
    problems: list[str] = field(default_factory=list)


def call(client: redis.Redis, name: str, *arguments: Any) -> Any:
    """Run a command and return its raw reply; a name in bytes keeps the driver from parsing it."""
    return cast(Any, client.execute_command)(name.encode(), *arguments)


def load_record(client: redis.Redis, namespace: str = "default") -> NamespaceRecord | None:
    stored = call(client, "GET", NamespaceKeys(namespace, 1).record)
    return None if stored is None else NamespaceRecord.decode(stored)


def backlog(client: redis.Redis, keys: NamespaceKeys) -> int:
    """Number of events in the streams, delivered or not."""
    return sum(int(call(client, "XLEN", keys.events(partition))) for partition in range(keys.partitions))


def read_store(client: redis.Redis) -> StoreContents:
    """Read the whole store; damaged records are reported as problems."""
    store: Any = client  # the driver types all replies as unions
    record = load_record(client)
    contents = StoreContents(record, {}, {}, 0, 0, [], {}, None, None, [])
    if record is None:
        return contents
    keys = record.keys
    counters: Counter[str] = Counter()
    for partition in range(keys.partitions):
        counters.update({name.decode(): int(value) for name, value in store.hgetall(keys.counters(partition)).items()})
        contents.attempts += int(call(client, "HLEN", keys.attempts(partition)))
        try:
            contents.pending += int(call(client, "XPENDING", keys.events(partition), LEARNERS)[0])
        except redis.ResponseError as error:
            contents.problems.append(f"partition {partition}: {error}")
        for entry_id, fields in store.xrange(keys.events(partition)):
            known = fields.get(b"a")
            contents.waiting[known.decode() if known is not None else entry_id.decode()] = entry_id
        contents.dead += [fields for _, fields in store.xrange(keys.dead_letters(partition))]
        for user_id, joined in store.hgetall(keys.versions(partition)).items():
            incarnation, version = joined.split(b":")
            name = user_id.decode()
            contents.users[name] = User(name, (int(incarnation), int(version)))
        for kind in ("user", "samples"):
            start = keys._in(partition, f"{kind}:")
            for key in store.scan_iter(f"{_escaped(start)}*", count=1_000):
                name = key.decode().removeprefix(start)
                user = contents.users.setdefault(name, User(name))
                try:
                    if kind == "user":
                        fields = store.hmget(key, "incarnation", "version", "epoch", "state")
                        user.tombstone = fields[1] == b"0" and fields[2:] == [None, None]
                        if not user.tombstone:
                            user.state = UserState.decode(name, *fields)
                    else:
                        user.samples = [Sample.decode(blob) for blob in store.lrange(key, 0, -1)]
                except Exception as error:
                    contents.problems.append(f"{kind} {name}: {error}")
    contents.counters = dict(counters)
    number, blob = store.hmget(keys.epoch, "number", "blob")
    contents.epoch_number = None if number is None else int(number)
    contents.epoch_log = [int(fields[b"n"]) for _, fields in store.xrange(keys.epoch_log)]
    if blob is not None:
        try:
            contents.epoch = Epoch.decode(blob)
        except Exception as error:
            contents.problems.append(f"epoch {contents.epoch_number}: {error}")
    return contents


def wait_drained(client: redis.Redis, *, timeout_s: float = WAIT_TIMEOUT_S) -> float:
    """Wait until the streams are empty; returns the seconds it took."""

    def drained() -> bool:
        record = load_record(client)
        return record is not None and backlog(client, record.keys) == 0

    return wait_until(drained, "the events are learned", timeout_s=timeout_s)


def wait_settled(client: redis.Redis) -> None:
    """Wait until no epoch is due and every user is fitted under a published epoch since the last refit."""

    def settled() -> bool:
        contents = read_store(client)
        if contents.epoch is None:
            return not contents.users
        trainer = trainer_of(contents)
        if trainer is None or trainer.learner.epoch_due(contents.epoch.events, contents.counters.get("applied", 0)):
            return False
        known = [user.state.epoch for user in contents.users.values() if user.state is not None]
        return all(contents.epoch.refitted <= number <= contents.epoch.number for number in known)

    wait_until(settled, "all users are fitted under an epoch published since the last change of inputs")


def audit(
    client: redis.Redis, sent: SentEvents, *, excused_until: tuple[float, ...] = (), window_s: float = 2.0
) -> Findings:
    """Compare a drained store with the answers the clients got.

    `excused_until`: times at which the store crashed; what was acknowledged within `window_s` before may be missing.
    """
    findings = Findings(problems=list(sent.problems))
    try:
        wait_drained(client)
        wait_settled(client)
    except WaitTimeout as error:
        findings.problems.append(str(error))
    contents = read_store(client)
    findings.problems += contents.problems
    _audit_effects(contents, sent, findings, excused_until, window_s)
    _audit_streams(contents, sent, findings)
    findings.problems += consistency(contents)
    findings.problems += audit_epochs(contents)
    findings.problems += audit_states(contents)
    return findings


def _audit_effects(
    contents: StoreContents, sent: SentEvents, findings: Findings, excused_until: tuple[float, ...], window_s: float
) -> None:
    if unknown := sent.unknown():
        findings.problems.append(f"{len(unknown)} events were sent and never acknowledged, {unknown[0].event_id} first")
    expected = [event for event in sent.acknowledged() if not event.poison]
    findings.acknowledged = len(expected)
    findings.applied = contents.effective
    effects: Counter[tuple[str, str]] = Counter()
    for user in contents.users.values():
        for sample in user.samples:
            # An event that took effect twice would be an earlier reward of its own sample.
            effects[user.user_id, sample.arm_id] += 1 if sample.earlier is None else 2
    rewards = {(user.user_id, one.arm_id): one.reward for user in contents.users.values() for one in user.samples}
    per_user: Counter[str] = Counter()
    for event in expected:
        place = (event.user_id, event.arm_id)
        times = effects.pop(place, 0)
        if times == 0:
            told = event.acknowledged_at or 0.0
            if any(crash - window_s <= told <= crash for crash in excused_until):
                findings.excused += 1
                continue
            findings.lost += 1
            findings.problems.append(f"{event.event_id} of {event.user_id} was acknowledged and had no effect")
        elif times > 1:
            findings.twice += times - 1
            findings.problems.append(f"{event.event_id} of {event.user_id} took effect {times} times")
        elif rewards[place] != event.reward:
            findings.problems.append(f"{event.event_id} was sent as {event.reward} and learned as {rewards[place]}")
        per_user[event.user_id] += 1
    for (user_id, arm_id), times in effects.items():
        # Stored but unknown to the client: allowed only where the store may lose acknowledged events.
        per_user[user_id] += times
        if not sent.may_lose:
            findings.problems.append(f"{user_id} learned {arm_id} {times} times without being sent it")
    for user in contents.users.values():
        version = user.standing[1] if user.standing else 0
        if version != per_user[user.user_id]:
            findings.twice += max(0, version - per_user[user.user_id])
            findings.problems.append(f"{user.user_id} is at version {version} after {per_user[user.user_id]} events")


def _audit_streams(contents: StoreContents, sent: SentEvents, findings: Findings) -> None:
    if contents.waiting or contents.pending or contents.attempts:
        findings.problems.append(
            f"{len(contents.waiting)} events wait, {contents.pending} are pending, {contents.attempts} have attempts"
        )
    poison = {event.event_id.encode() for event in sent.events.values() if event.poison}
    valid_dead_letters = [fields for fields in contents.dead if not foreign(fields) and fields[b"id"] not in poison]
    findings.valid_dead_letters = len(valid_dead_letters)
    findings.problems += [
        f"{fields[b'id'].decode()} is valid and became a dead letter: {fields.get(b'dead_reason', b'').decode()}"
        for fields in valid_dead_letters
    ]


def consistency(contents: StoreContents) -> list[str]:
    """Invariants that hold at any time: no update is half applied."""
    problems = []
    counted = Counter(contents.counters)
    if contents.versions != contents.effective:
        problems.append(f"Σ versions is {contents.versions}, applied and not forgotten are {contents.effective}")
    strangers = sum(map(foreign, contents.dead))
    came = counted["enqueued"] + counted["replayed"] + strangers
    went = counted["applied"] + counted["voided"] + counted["buried"]
    if came != went + len(contents.waiting):
        problems.append(f"{came} events came, {went} went and {len(contents.waiting)} wait: {contents.counters}")
    if counted["buried"] != len(contents.dead) and not counted["replayed"] and not counted["forgotten"]:
        problems.append(f"{counted['buried']} were counted as dead letters, {len(contents.dead)} are stored")
    learned = {sample.arm_id for user in contents.users.values() for sample in user.samples}
    if both := learned & contents.waiting.keys():
        problems.append(f"{sorted(both)[:3]} are learned and still wait")
    for user in contents.users.values():
        if user.tombstone and user.standing is not None and user.standing[1] == 0 and not user.samples:
            continue
        if user.standing is None or user.state is None:
            problems.append(f"{user.user_id} is half there: standing {user.standing}, state {user.state is not None}")
        elif user.standing != (user.state.incarnation, user.state.version):
            problems.append(f"{user.user_id} is at {user.standing}, and the state at {user.state.version}")
        elif user.standing[1] != len(user.samples):
            problems.append(f"{user.user_id} is at version {user.standing[1]} with {len(user.samples)} samples")
    return problems


def audit_epochs(contents: StoreContents) -> list[str]:
    """Epoch numbers have no gaps; the last epoch is readable and finite."""
    problems = []
    log = contents.epoch_log
    if log != list(range(log[0], log[0] + len(log)) if log else []):
        problems.append(f"the epoch log has gaps: {log[-12:]}")
    if contents.epoch_number is not None:
        if (
            contents.epoch is None
            or contents.epoch.number != contents.epoch_number
            or not log
            or log[-1] != contents.epoch_number
        ):
            problems.append(f"epoch {contents.epoch_number} is not whole: the log ends with {log[-3:]}")
        elif not all(np.isfinite(array).all() for array in contents.epoch.tensors.values()):
            problems.append(f"epoch {contents.epoch_number} is not finite")
    for user in contents.users.values():
        if user.state is None:
            continue
        if contents.epoch_number is not None and user.state.epoch > contents.epoch_number:
            problems.append(f"{user.user_id} is of epoch {user.state.epoch}, after {contents.epoch_number}")
        if not all(np.isfinite(array).all() for array in user.state.tensors.values()):
            problems.append(f"the state of {user.user_id} is not finite")
    return problems


def trainer_of(contents: StoreContents) -> Trainer | None:
    """The trainer that a worker would use."""
    if contents.record is None or contents.record.layout is None:
        return None
    settings = stored_settings(contents.record.learner)
    layout = FeatureLayout.from_json(contents.record.layout)
    learner = build_learner(settings, layout.parts)
    return Trainer(learner, torch.device("cpu"), user_weight=settings.user_weight)


def audit_states(contents: StoreContents, *, whole: bool = False) -> list[str]:
    """Every state that was fitted under the current epoch equals a new fit of the user's samples.

    A state depends on the arms' effects of its epoch, and earlier epochs are not kept. With `whole`, every user has to
    be fitted under the current one.
    """
    trainer = trainer_of(contents)
    if trainer is None or contents.epoch is None:
        return []
    shared = {name: torch.from_numpy(array.copy()) for name, array in contents.epoch.tensors.items()}
    known = [user for user in contents.users.values() if user.state is not None and user.samples]
    fit_inputs = [FitInput(user.user_id, len(user.samples), user.samples, None) for user in known]
    fitted = trainer.fit(shared, fit_inputs)
    problems = []
    for user, again in zip(known, fitted.states, strict=True):
        state = user.state
        if state is None or user.user_id in fitted.quarantined:
            continue
        current = state.epoch == contents.epoch.number
        if state.epoch < contents.epoch.refitted or (whole and not current):
            problems.append(
                f"{user.user_id} is of epoch {state.epoch}, at epoch {contents.epoch.number}, "
                f"with all users refitted under {contents.epoch.refitted}"
            )
            continue
        problems += [
            f"{name} of {user.user_id} is not what {len(user.samples)} samples make of it"
            for name in again
            if current and not close(state.tensors[name], again[name])
        ]
    return problems


def foreign(fields: dict[bytes, bytes]) -> bool:
    """Whether a dead letter is an entry that the service did not accept."""
    return fields.get(b"id", FOREIGN).startswith(FOREIGN)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal up to the order of sums."""
    if one.shape != other.shape:
        return False
    scale = max(1.0, float(np.abs(other).max(initial=0.0)))
    return bool(np.allclose(one / scale, other / scale, rtol=TOLERANCE, atol=TOLERANCE))


def _escaped(text: str) -> str:
    """Escape for a glob pattern."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in text)
