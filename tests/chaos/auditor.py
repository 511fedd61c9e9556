"""Reads the store, without the code that wrote it where that is possible, and compares it with the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast, final

import numpy as np
import redis
import torch

from models.features import FeatureLayout
from models.presets import build_learner
from models.settings import stored_settings
from store.codec import Sample
from store.epochs import Epoch
from store.keys import LEARNERS, NamespaceKeys
from store.namespaces import NamespaceRecord
from store.users import UserState
from tests.chaos.deployment import PATIENCE_S, Impatient, wait_until
from tests.chaos.ledger import Ledger
from worker.trainer import Pupil, Trainer

#: What of a user's state does not change with the prior: the same under all epochs since the last refit.
LASTING_FIELDS = ("gram", "moment", "kept_heads", "kept_rewards")
#: Sums of float32 in another order.
TOLERANCE = 1e-4
#: How the ids of events begin that were put into a stream behind the service's back.
FOREIGN = b"foreign"


@final
@dataclass
class User:
    """A user as the store has them."""

    user_id: str
    standing: tuple[int, int] | None = None  # (incarnation, version) as `versions` says
    state: UserState | None = None
    samples: list[Sample] = field(default_factory=list)
    #: Forgotten: nothing is left but the number of the incarnation.
    tombstone: bool = False


@final
@dataclass
class Books:
    """What the store holds."""

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
        """Events that were applied to users who were not forgotten since."""
        return self.counters.get("applied", 0) - self.counters.get("forgotten", 0)


@final
@dataclass
class Findings:
    """What an audit found."""

    acknowledged: int = 0
    applied: int = 0
    lost: int = 0
    twice: int = 0
    innocents: int = 0
    excused: int = 0
    problems: list[str] = field(default_factory=list)


def call(client: redis.Redis, name: str, *arguments: Any) -> Any:
    """A command and its reply as the wire gives it: named in bytes, the driver does not know how to parse it."""
    return cast(Any, client.execute_command)(name.encode(), *arguments)


def load_record(client: redis.Redis, namespace: str = "default") -> NamespaceRecord | None:
    stored = call(client, "GET", NamespaceKeys(namespace, 1).record)
    return None if stored is None else NamespaceRecord.decode(stored)


def backlog(client: redis.Redis, keys: NamespaceKeys) -> int:
    """Events that wait, delivered or not."""
    return sum(int(call(client, "XLEN", keys.events(partition))) for partition in range(keys.partitions))


def read_books(client: redis.Redis) -> Books:
    """Everything there is; damage is among the problems."""
    store: Any = client  # whose replies the driver types as unions of everything
    record = load_record(client)
    books = Books(record, {}, {}, 0, 0, [], {}, None, None, [])
    if record is None:
        return books
    keys = record.keys
    counters: Counter[str] = Counter()
    for partition in range(keys.partitions):
        counters.update({name.decode(): int(value) for name, value in store.hgetall(keys.counters(partition)).items()})
        books.attempts += int(call(client, "HLEN", keys.attempts(partition)))
        try:
            books.pending += int(call(client, "XPENDING", keys.events(partition), LEARNERS)[0])
        except redis.ResponseError as error:
            books.problems.append(f"partition {partition}: {error}")
        for entry_id, fields in store.xrange(keys.events(partition)):
            known = fields.get(b"a")
            books.waiting[known.decode() if known is not None else entry_id.decode()] = entry_id
        books.dead += [fields for _, fields in store.xrange(keys.dead_letters(partition))]
        for user_id, joined in store.hgetall(keys.versions(partition)).items():
            incarnation, version = joined.split(b":")
            name = user_id.decode()
            books.users[name] = User(name, (int(incarnation), int(version)))
        for kind in ("user", "samples"):
            start = keys._in(partition, f"{kind}:")
            for key in store.scan_iter(f"{_escaped(start)}*", count=1_000):
                name = key.decode().removeprefix(start)
                user = books.users.setdefault(name, User(name))
                try:
                    if kind == "user":
                        fields = store.hmget(key, "incarnation", "version", "epoch", "state")
                        user.tombstone = fields[1] == b"0" and fields[2:] == [None, None]
                        if not user.tombstone:
                            user.state = UserState.decode(name, *fields)
                    else:
                        user.samples = [Sample.decode(blob) for blob in store.lrange(key, 0, -1)]
                except Exception as error:
                    books.problems.append(f"{kind} {name}: {error}")
    books.counters = dict(counters)
    number, blob = store.hmget(keys.epoch, "number", "blob")
    books.epoch_number = None if number is None else int(number)
    books.epoch_log = [int(fields[b"n"]) for _, fields in store.xrange(keys.epoch_log)]
    if blob is not None:
        try:
            books.epoch = Epoch.decode(blob)
        except Exception as error:
            books.problems.append(f"epoch {books.epoch_number}: {error}")
    return books


def wait_drained(client: redis.Redis, *, patience_s: float = PATIENCE_S) -> float:
    """Wait until no event waits; the seconds it took."""

    def drained() -> bool:
        record = load_record(client)
        return record is not None and backlog(client, record.keys) == 0

    return wait_until(drained, "the events are learned", patience_s=patience_s)


def wait_settled(client: redis.Redis) -> None:
    """Wait until no epoch is due and everybody is of one that is out, and of none before the last change of inputs."""

    def settled() -> bool:
        books = read_books(client)
        if books.epoch is None:
            return not books.users
        trainer = trainer_of(books)
        if trainer is None or trainer.learner.epoch_due(books.epoch.events, books.counters.get("applied", 0)):
            return False
        known = [user.state.epoch for user in books.users.values() if user.state is not None]
        return all(books.epoch.refitted <= number <= books.epoch.number for number in known)

    wait_until(settled, "everybody is fitted under an epoch that is out, since the last change of inputs")


def audit(
    client: redis.Redis, ledger: Ledger, *, excused_until: tuple[float, ...] = (), window_s: float = 2.0
) -> Findings:
    """Compare a drained store with what clients were told.

    `excused_until`: times at which the store crashed; what was acknowledged within `window_s` before may be missing.
    """
    findings = Findings(problems=list(ledger.problems))
    try:
        wait_drained(client)
        wait_settled(client)
    except Impatient as error:
        findings.problems.append(str(error))
    books = read_books(client)
    findings.problems += books.problems
    _audit_effects(books, ledger, findings, excused_until, window_s)
    _audit_streams(books, ledger, findings)
    findings.problems += consistency(books)
    findings.problems += audit_epochs(books)
    findings.problems += audit_states(books)
    return findings


def _audit_effects(
    books: Books, ledger: Ledger, findings: Findings, excused_until: tuple[float, ...], window_s: float
) -> None:
    if unknown := ledger.unknown():
        findings.problems.append(f"{len(unknown)} events were sent and never acknowledged, {unknown[0].event_id} first")
    expected = [event for event in ledger.acknowledged() if not event.poison]
    findings.acknowledged = len(expected)
    findings.applied = books.effective
    effects = Counter((user.user_id, sample.arm_id) for user in books.users.values() for sample in user.samples)
    rewards = {(user.user_id, one.arm_id): one.reward for user in books.users.values() for one in user.samples}
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
            findings.problems.append(f"{event.event_id} was told as {event.reward} and learned as {rewards[place]}")
        per_user[event.user_id] += 1
    for (user_id, arm_id), times in effects.items():
        # Stored, and the client never heard of it: only where the store may lose what a client knows.
        per_user[user_id] += times
        if not ledger.may_lose:
            findings.problems.append(f"{user_id} learned {arm_id} {times} times, which nobody told")
    for user in books.users.values():
        version = user.standing[1] if user.standing else 0
        if version != per_user[user.user_id]:
            findings.twice += max(0, version - per_user[user.user_id])
            findings.problems.append(f"{user.user_id} is at version {version} after {per_user[user.user_id]} events")


def _audit_streams(books: Books, ledger: Ledger, findings: Findings) -> None:
    if books.waiting or books.pending or books.attempts:
        findings.problems.append(
            f"{len(books.waiting)} events wait, {books.pending} are pending, {books.attempts} attempts are on record"
        )
    poison = {event.event_id.encode() for event in ledger.events.values() if event.poison}
    innocents = [fields for fields in books.dead if not foreign(fields) and fields[b"id"] not in poison]
    findings.innocents = len(innocents)
    findings.problems += [
        f"{fields[b'id'].decode()} is innocent and was buried: {fields.get(b'dead_reason', b'').decode()}"
        for fields in innocents
    ]


def consistency(books: Books) -> list[str]:
    """What has to hold at any moment, whatever clients know: nothing is half done."""
    problems = []
    counted = Counter(books.counters)
    if books.versions != books.effective:
        problems.append(f"Σ versions is {books.versions}, applied and not forgotten are {books.effective}")
    strangers = sum(map(foreign, books.dead))
    came = counted["enqueued"] + counted["replayed"] + strangers
    went = counted["applied"] + counted["voided"] + counted["buried"]
    if came != went + len(books.waiting):
        problems.append(f"{came} events came, {went} went and {len(books.waiting)} wait: {books.counters}")
    if counted["buried"] != len(books.dead) and not counted["replayed"] and not counted["forgotten"]:
        problems.append(f"{counted['buried']} were counted as buried, {len(books.dead)} are dead letters")
    learned = {sample.arm_id for user in books.users.values() for sample in user.samples}
    if both := learned & books.waiting.keys():
        problems.append(f"{sorted(both)[:3]} are learned and still wait")
    for user in books.users.values():
        if user.tombstone and user.standing is not None and user.standing[1] == 0 and not user.samples:
            continue
        if user.standing is None or user.state is None:
            problems.append(f"{user.user_id} is half there: standing {user.standing}, state {user.state is not None}")
        elif user.standing != (user.state.incarnation, user.state.version):
            problems.append(f"{user.user_id} is at {user.standing}, and the state at {user.state.version}")
        elif user.standing[1] != len(user.samples):
            problems.append(f"{user.user_id} is at version {user.standing[1]} with {len(user.samples)} samples")
    return problems


def audit_epochs(books: Books) -> list[str]:
    """Epochs are whole: numbers without gaps, the last one readable and finite."""
    problems = []
    log = books.epoch_log
    if log != list(range(log[0], log[0] + len(log)) if log else []):
        problems.append(f"the epoch log has gaps: {log[-12:]}")
    if books.epoch_number is not None:
        if books.epoch is None or books.epoch.number != books.epoch_number or not log or log[-1] != books.epoch_number:
            problems.append(f"epoch {books.epoch_number} is not whole: the log ends with {log[-3:]}")
        elif not all(np.isfinite(array).all() for array in books.epoch.tensors.values()):
            problems.append(f"epoch {books.epoch_number} is not finite")
    for user in books.users.values():
        if user.state is None:
            continue
        if books.epoch_number is not None and user.state.epoch > books.epoch_number:
            problems.append(f"{user.user_id} is of epoch {user.state.epoch}, after {books.epoch_number}")
        if not all(np.isfinite(array).all() for array in user.state.tensors.values()):
            problems.append(f"the state of {user.user_id} is not finite")
    return problems


def trainer_of(books: Books) -> Trainer | None:
    """What a worker would fit users with."""
    if books.record is None or books.record.layout is None:
        return None
    settings = stored_settings(books.record.learner)
    learner = build_learner(settings, FeatureLayout.from_json(books.record.layout).dimension)
    return Trainer(learner, torch.device("cpu"), user_weight=settings.user_weight)


def audit_states(books: Books, *, whole: bool = False) -> list[str]:
    """Everybody's tensors are what their samples make of them, as far as the current epoch can tell.

    With `whole`, everybody has to be of the current epoch, where it can tell everything.
    """
    trainer = trainer_of(books)
    if trainer is None or books.epoch is None:
        return []
    shared = {name: torch.from_numpy(array.copy()) for name, array in books.epoch.tensors.items()}
    known = [user for user in books.users.values() if user.state is not None and user.samples]
    pupils = [Pupil(user.user_id, len(user.samples), user.samples, None) for user in known]
    fitted = trainer.fit(shared, pupils)
    problems = []
    for user, again in zip(known, fitted.states, strict=True):
        state = user.state
        if state is None or user.user_id in fitted.quarantined:
            continue
        current = state.epoch == books.epoch.number
        if state.epoch < books.epoch.refitted or (whole and not current):
            problems.append(
                f"{user.user_id} is of epoch {state.epoch}, at epoch {books.epoch.number}, "
                f"with everybody refitted under {books.epoch.refitted}"
            )
            continue
        same_since = np.array_equal(state.tensors.get("since", 0), again.get("since", 0))
        names = tuple(again) if current else tuple(name for name in LASTING_FIELDS if name in again and same_since)
        problems += [
            f"{name} of {user.user_id} is not what {len(user.samples)} samples make of it"
            for name in names
            if not close(state.tensors[name], again[name])
        ]
    return problems


def foreign(fields: dict[bytes, bytes]) -> bool:
    """Whether a dead letter is of an entry that the service never took in."""
    return fields.get(b"id", FOREIGN).startswith(FOREIGN)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal up to the order of sums."""
    if one.shape != other.shape:
        return False
    scale = max(1.0, float(np.abs(other).max(initial=0.0)))
    return bool(np.allclose(one / scale, other / scale, rtol=TOLERANCE, atol=TOLERANCE))


def _escaped(text: str) -> str:
    """For a glob pattern."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in text)
