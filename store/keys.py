"""Every key of the store.

Prefix `metaban:`, then a hash tag, so that all keys of one script are in one slot of a cluster: `{namespace:meta}` for
shared keys, `{namespace:pNN}` for one partition. Ids come last and may contain braces: only the first tag counts.

    key of the store       type    meaning                                                     expiry
    {namespaces}:names     set     names of all namespaces                                     none

    key of the meta slot   type    meaning                                                     expiry
    namespace              string  NamespaceRecord as JSON                                     none
    epoch                  hash    number, blob, members, stamp, follows: the current Epoch;
                                   members are user ids as JSON, removed when forgotten; the
                                   stamp is unique, also if a store lost an epoch of its number none
    epoch_log              stream  n: number of each published epoch                           capped
    lease                  string  epoch lease: token of a worker, a snapshot or a restore     PX of the lease
    workers                zset    token of each worker → when its registration expires, in ms  by the next look
    owners                 hash    partition leases: partition → token of the worker that reads
                                   it; a lease lasts as long as its worker is registered       released by its worker
    refits                 string  number of the latest refit begun                            none
    restoring              hash    generation, token, snapshot, target: the unfinished restore none
    restores               string  generation of the latest restore begun                      none
    audit                  stream  a, m, p, r, d: one AuditLine each                           capped
    catalogue              hash    revision and its stamp; compacted: the latest revision of a
                                   deleted tombstone; lost_version: the highest version of one none
    catalogue_log          list    stamps of the revisions, the latest first                   trimmed
    arms                   hash    arm id → its features as JSON                               none
    arm_order              zset    arm id → 0: the arms in the order of their ids              none
    arm_versions           hash    arm id → version:updated ms, also of tombstones             with the tombstone
    arm_changes            zset    arm id → revision of its latest change, also of tombstones  with the tombstone
    arm_removals           zset    tombstones: id of a removed arm → revision                  the oldest first
    fusion                 hash    version, stamp, blob, sources, report, created_ms, events: the
                                   current FusionRecord; sources are removed when forgotten;
                                   count: number of sources at first, struck: removed ones     none
    fusion_sources         hash    token of a source → user id, removed when forgotten         none
    fusion_job             hash    the latest FusionJobRecord                                  none
    fusion_lease           string  token of the worker that trains fusion                      PX of the lease
    transfer_jobs          hash    job id → TransferJobRecord as JSON; removed when a user it
                                   names is forgotten; the oldest are deleted                  a day after a write
    transfer_results       hash    id of a job that is done → its result as JSON               as its job
    transfer_lease         string  token of the worker that runs transfer jobs                 PX of the lease

    key of a partition     type    meaning                                                     expiry
    marker                 string  the store id; missing after FLUSHALL                        none
    events                 stream  RewardEvents not yet applied, read by group `learners`      never trimmed
    counters               hash    numbers of events, see `users/users.py`                     none
    update_log             stream  u, i, v, e, t: one UpdateEntry each                         capped
    versions               hash    user id → incarnation:version; `N:0` is a tombstone         none
    user:<user id>         hash    incarnation, version, epoch, state, trail: one UserState;
                                   the last three are missing in a tombstone; forgot: the
                                   incarnation after the last forgetting                       none
    samples:<user id>      list    latest Samples, oldest first                                trimmed
    profile:<user id>      string  the user's profile as JSON                                  none
    start:<user id>        hash    incarnation, start: the user's warm start                   none
    decided:<user id>      zset    decision id → when that decision expires, in ms             with the last of them
    last_seen              zset    user id → day of the latest decision, counted from 1970     with the user
    seen:<digest>          string  entry id of an accepted event, for deduplication; digest of
                                   user id and event id                                        dedupe window
    rewarded:<digest>      string  number of accepted events with ids of their own for an arm of
                                   a decision; digest of user id, decision id and arm id       dedupe window
    dead_letters           stream  events that could not be applied, with the reason           none
    attempts               hash    entry id → number of solo attempts                          with the event
    decision:<decision id> string  one DecisionRecord                                          10 s, once it is in
                                                                                               `decided` the reward and
                                                                                               late window
    awaiting               zset    rank:decision id → when its reward is overdue, in ms        none
    refit                  string  number of the last refit that wrote here                    none
    replaced               hash    user id → incarnation:version:epoch:state that a refit
                                   replaced; removed when forgotten                            after the refit
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

#: More partitions would make scans over all of them too slow.
MAX_PARTITIONS: Final = 1024


@final
@dataclass(frozen=True, slots=True)
class NamespaceKeys:
    """Keys of one namespace, whose number of partitions is fixed at creation."""

    namespace: str
    partitions: int

    def __post_init__(self) -> None:
        if not NAMESPACE_PATTERN.fullmatch(self.namespace):
            raise ValueError(f"namespace {self.namespace!r} must match {NAMESPACE_PATTERN.pattern}")
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ValueError(f"partitions must be between 1 and {MAX_PARTITIONS}, not {self.partitions}")

    def partition_of(self, text_id: str) -> int:
        """Partition of a user id or decision id: the same in every process and version."""
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
    def owners(self) -> str:
        return self._meta("owners")

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

    def refit(self, partition: int) -> str:
        return self._in(partition, "refit")

    def replaced(self, partition: int) -> str:
        return self._in(partition, "replaced")

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

    def last_seen(self, partition: int) -> str:
        return self._in(partition, "last_seen")

    def seen(self, user_id: str, event_id: str) -> str:
        """Deduplication key, in the partition of the user; event ids are unique within a user."""
        return self._of_event("seen", user_id, event_id)

    def rewarded(self, user_id: str, plain_event_id: str) -> str:
        """Number of rewards with ids of their own for the arm that this id names, in the partition of the user."""
        return self._of_event("rewarded", user_id, plain_event_id)

    def _of_event(self, kind: str, user_id: str, event_id: str) -> str:
        # The length keeps two different pairs of ids apart.
        digest = blake2b(f"{len(user_id)}:{user_id}{event_id}".encode(), digest_size=16).hexdigest()
        return self._in(self.partition_of(user_id), f"{kind}:{digest}")

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
        """Pattern that matches all keys of the namespace and no others."""
        return f"{PREFIX}:{{{self.namespace}:*"

    @property
    def shared(self) -> list[str]:
        """All keys of the meta slot except the record."""
        return [
            self.epoch, self.epoch_log, self.lease, self.workers, self.owners, self.refits, self.restoring,
            self.restores, self.audit, self.catalogue, self.catalogue_log, self.arms, self.arm_order, self.arm_versions,
            self.arm_changes, self.arm_removals, self.fusion, self.fusion_sources, self.fusion_job, self.fusion_lease,
            self.transfer_jobs, self.transfer_results, self.transfer_lease,
        ]  # fmt: skip

    def guard_of(self, key: str) -> str:
        """Key with the store id in the slot of a key: the record, or the marker of the partition.

        Also for a partition that an earlier namespace of this name had.
        """
        tag, _, _ = key.partition("}")
        return f"{tag}}}:namespace" if tag.endswith(":meta") else f"{tag}}}:marker"

    def _meta(self, name: str) -> str:
        return f"{PREFIX}:{{{self.namespace}:meta}}:{name}"

    def _in(self, partition: int, name: str) -> str:
        if not 0 <= partition < self.partitions:
            raise ValueError(f"no partition {partition} among {self.partitions}")
        return f"{PREFIX}:{{{self.namespace}:p{partition:02d}}}:{name}"
