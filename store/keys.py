"""Every key of the store, named once.

Prefix `metaban:`; then a hash tag, so that all that one script touches lives in one slot of a cluster:
`{namespace:meta}` for what a namespace shares, `{namespace:pNN}` for one partition of its users. Ids come
last and may hold anything, braces too: only the first tag of a key counts.

    key of the store       type    meaning                                                     expiry
    {namespaces}:names     set     names of all namespaces                                     none

    key of the meta slot   type    meaning                                                     expiry
    namespace              string  NamespaceRecord as JSON                                     none
    epoch                  hash    number, blob, members, stamp, follows: the current Epoch;
                                   members are user ids as JSON, struck out when forgotten; the
                                   stamp tells it from one of its number that the store lost   none
    epoch_log              stream  n: number of each published epoch                           capped
    lease                  string  token of the one meta-trainer, or of a snapshot or restore  PX of the lease
    workers                zset    token of each worker that is there → when it counts no more  by the next look
    refits                 string  refits begun, ever: the number of the latest                none
    restoring              hash    generation, token, snapshot, target: a restore not finished none
    restores               string  restores begun, ever: the generation of the latest          none
    audit                  stream  a, m, p, r, d: who did what of an admin's, and with which
                                   request                                                     capped
    catalogue              hash    revision, stamp of it; compacted: the latest revision with
                                   a tombstone that is gone; lost_version: the highest version
                                   of one                                                      none
    catalogue_log          list    stamps of the revisions, the latest first                   trimmed
    arms                   hash    arm id → its features as JSON                               none
    arm_order              zset    arm id → 0: the arms in the order of their ids              none
    arm_versions           hash    arm id → version:updated ms, of tombstones too              with the tombstone
    arm_changes            zset    arm id → revision of its latest change, of tombstones too   with the tombstone
    arm_removals           zset    tombstones: id of a removed arm → revision                  the oldest go
    fusion                 hash    version, stamp, blob, sources, report, created_ms, events: the
                                   current FusionRecord; sources are struck out when forgotten,
                                   count: how many there were, struck: how many are gone       none
    fusion_sources         hash    token of a source → user id, struck out when forgotten      none
    fusion_job             hash    what became of the latest training: one FusionJob           none
    fusion_lease           string  token of the one who trains fusion                          PX of the lease
    transfer_jobs          hash    job id → TransferJob as JSON, struck out when somebody it
                                   names is forgotten; the oldest go                           a day after the last word
    transfer_results       hash    id of a job that is done → what came of it, as JSON         as its job
    transfer_lease         string  token of the one who works on a transfer job                PX of the lease

    key of a partition     type    meaning                                                     expiry
    marker                 string  the store epoch; missing after FLUSHALL                     none
    owner                  string  token of the one worker that reads the partition            PX of the lease
    events                 stream  RewardEvents not yet applied, read by group `learners`      never trimmed
    counters               hash    what was counted, ever: `store.users` says what adds up     none
    update_log             stream  u, i, v, e, t: which user moved to which version            capped
    versions               hash    user id → incarnation:version; `N:0` is a tombstone         none
    user:<user id>         hash    incarnation, version, epoch, state, trail: one UserState;
                                   the last three are missing in a tombstone; forgot: the
                                   incarnation that began when the user was last forgotten     none
    samples:<user id>      list    latest Samples, oldest first                                trimmed
    profile:<user id>      string  what requests told of the user, as JSON                     none
    start:<user id>        hash    incarnation, start: the Start that the user's learner has    none
    decided:<user id>      zset    decision id → when that decision expires, in ms             with the last of them
    seen:<digest>          string  entry id the event got: dedupe; the digest is of user and
                                   event id, so that it names neither                          dedupe window
    dead_letters           stream  events given up on, with the reason                         none
    attempts               hash    entry id → attempts made on that event alone                with the event
    decision:<decision id> string  one Decision                                                reward and late window
    awaiting               zset    rank:decision id → when its reward is overdue, in ms         none
    refit                  string  number of the last refit that wrote here                    none
    restored               string  generation of the last restore that wrote here              none
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, final

PREFIX: Final = "metaban"
#: The names of all namespaces.
NAMESPACE_NAMES: Final = f"{PREFIX}:{{namespaces}}:names"
#: The consumer group of the workers on every event stream.
LEARNERS: Final = "learners"
NAMESPACE_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
#: Above this, scans over all partitions would cost more than the parallelism they give.
MAX_PARTITIONS: Final = 1024


@final
@dataclass(frozen=True, slots=True)
class NamespaceKeys:
    """The keys of one namespace; its number of partitions is fixed when it is created."""

    namespace: str
    partitions: int

    def __post_init__(self) -> None:
        if not NAMESPACE_PATTERN.fullmatch(self.namespace):
            raise ValueError(f"namespace {self.namespace!r} must match {NAMESPACE_PATTERN.pattern}")
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ValueError(f"partitions must be between 1 and {MAX_PARTITIONS}, not {self.partitions}")

    def partition_of(self, text_id: str) -> int:
        """The partition of a user or decision id: the same in every process and version."""
        digest = blake2b(text_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.partitions

    @property
    def record(self) -> str:
        return self._meta("namespace")

    @property
    def epoch(self) -> str:
        return self._meta("epoch")

    @property
    def epoch_log(self) -> str:
        return self._meta("epoch_log")

    @property
    def lease(self) -> str:
        return self._meta("lease")

    @property
    def workers(self) -> str:
        return self._meta("workers")

    @property
    def refits(self) -> str:
        return self._meta("refits")

    @property
    def restoring(self) -> str:
        return self._meta("restoring")

    @property
    def restores(self) -> str:
        return self._meta("restores")

    @property
    def audit(self) -> str:
        return self._meta("audit")

    @property
    def catalogue(self) -> str:
        return self._meta("catalogue")

    @property
    def catalogue_log(self) -> str:
        return self._meta("catalogue_log")

    @property
    def arms(self) -> str:
        return self._meta("arms")

    @property
    def arm_order(self) -> str:
        return self._meta("arm_order")

    @property
    def arm_versions(self) -> str:
        return self._meta("arm_versions")

    @property
    def arm_changes(self) -> str:
        return self._meta("arm_changes")

    @property
    def arm_removals(self) -> str:
        return self._meta("arm_removals")

    @property
    def fusion(self) -> str:
        return self._meta("fusion")

    @property
    def fusion_sources(self) -> str:
        return self._meta("fusion_sources")

    @property
    def fusion_job(self) -> str:
        return self._meta("fusion_job")

    @property
    def fusion_lease(self) -> str:
        return self._meta("fusion_lease")

    @property
    def transfer_jobs(self) -> str:
        return self._meta("transfer_jobs")

    @property
    def transfer_results(self) -> str:
        return self._meta("transfer_results")

    @property
    def transfer_lease(self) -> str:
        return self._meta("transfer_lease")

    def marker(self, partition: int) -> str:
        return self._in(partition, "marker")

    def owner(self, partition: int) -> str:
        return self._in(partition, "owner")

    def refit(self, partition: int) -> str:
        return self._in(partition, "refit")

    def events(self, partition: int) -> str:
        return self._in(partition, "events")

    def counters(self, partition: int) -> str:
        return self._in(partition, "counters")

    def update_log(self, partition: int) -> str:
        return self._in(partition, "update_log")

    def versions(self, partition: int) -> str:
        return self._in(partition, "versions")

    def dead_letters(self, partition: int) -> str:
        return self._in(partition, "dead_letters")

    def attempts(self, partition: int) -> str:
        return self._in(partition, "attempts")

    def awaiting(self, partition: int) -> str:
        return self._in(partition, "awaiting")

    def restored(self, partition: int) -> str:
        return self._in(partition, "restored")

    def seen(self, user_id: str, event_id: str) -> str:
        """Beside the stream it guards; event ids are a user's own, and the length keeps the two ids apart."""
        digest = blake2b(f"{len(user_id)}:{user_id}{event_id}".encode(), digest_size=16).hexdigest()
        return self._in(self.partition_of(user_id), f"seen:{digest}")

    def user(self, user_id: str) -> str:
        return self._in(self.partition_of(user_id), f"user:{user_id}")

    def samples(self, user_id: str) -> str:
        return self._in(self.partition_of(user_id), f"samples:{user_id}")

    def profile(self, user_id: str) -> str:
        return self._in(self.partition_of(user_id), f"profile:{user_id}")

    def start(self, user_id: str) -> str:
        return self._in(self.partition_of(user_id), f"start:{user_id}")

    def decided(self, user_id: str) -> str:
        return self._in(self.partition_of(user_id), f"decided:{user_id}")

    def decision(self, decision_id: str) -> str:
        return self._in(self.partition_of(decision_id), f"decision:{decision_id}")

    @property
    def every_pattern(self) -> str:
        """What all keys of the namespace match, and none of another."""
        return f"{PREFIX}:{{{self.namespace}:*"

    @property
    def shared(self) -> list[str]:
        """All that the meta slot has, but the record."""
        return [
            self.epoch, self.epoch_log, self.lease, self.workers, self.refits, self.restoring, self.restores,
            self.audit, self.catalogue, self.catalogue_log, self.arms, self.arm_order, self.arm_versions,
            self.arm_changes, self.arm_removals, self.fusion, self.fusion_sources, self.fusion_job, self.fusion_lease,
            self.transfer_jobs, self.transfer_results, self.transfer_lease,
        ]  # fmt: skip

    def guard_of(self, key: str) -> str:
        """What tells in the slot of a key of this namespace whose it is: the record, or the marker of a partition.

        Also of a partition that there is no more, since the name had another number of them once.
        """
        tag, _, _ = key.partition("}")
        return f"{tag}}}:namespace" if tag.endswith(":meta") else f"{tag}}}:marker"

    def _meta(self, name: str) -> str:
        return f"{PREFIX}:{{{self.namespace}:meta}}:{name}"

    def _in(self, partition: int, name: str) -> str:
        if not 0 <= partition < self.partitions:
            raise ValueError(f"no partition {partition} among {self.partitions}")
        return f"{PREFIX}:{{{self.namespace}:p{partition:02d}}}:{name}"
