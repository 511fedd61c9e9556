"""All faults by name, with their share of a long run and their seconds in the test suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from tests.chaos.faults import backlog, epochs, files, network, poison, processes, requests, resets
from tests.chaos.fork_server import ForkServer
from tests.chaos.run import Row, Run


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject into a deployment."""

    name: str
    work: Callable[[Run], None]
    share: float = 1.0
    #: Seconds of injection; each step of a fault runs at least once, however long it takes.
    short_s: float = 1.0

    @property
    def about(self) -> str:
        return (self.work.__doc__ or "").split("\n")[0]

    def run(self, fork_server: ForkServer, *, seconds: float, seed: int, timed: bool = False) -> Row:
        return Run(self.name, fork_server, seconds=seconds, seed=seed, timed=timed).finish(self.work)


FAULTS: Sequence[Fault] = (
    Fault("worker-kill", processes.kill_workers),
    Fault("worker-failpoints", processes.kill_workers_at_failpoints),
    Fault("worker-recovery", processes.measure_recovery, 0.5, 0.0),
    Fault("worker-stall", processes.stall_workers, 0.5, 0.0),
    Fault("server-kill", processes.kill_servers),
    Fault("server-failpoints", processes.kill_servers_at_failpoints),
    Fault("store-kill-always", processes.kill_store_always),
    Fault("store-kill-everysec", processes.kill_store_everysec),
    Fault("meta-kill", epochs.kill_epoch_trainer, 1.0, 0.0),
    Fault("lost-replies", network.lose_replies),
    Fault("cut-connections", network.cut_connections),
    Fault("slow-store", network.delay_replies),
    Fault("silent-store", network.drop_all_bytes),
    Fault("backlog-full", backlog.fill_backlog, 0.5),
    Fault("groups-destroyed", backlog.destroy_groups),
    Fault("store-emptied", backlog.empty_store, 0.2),
    Fault("foreign-entries", poison.add_invalid_entries, 0.5),
    Fault("poison", poison.send_killing_event, 1.0, 0.0),
    Fault("file-cut", files.cut_file, 1.5),
    Fault("server-stop", requests.stop_servers),
    Fault("extremes", requests.send_extremes, 0.5),
    Fault("forget", resets.forget_users, 0.5),
    Fault("restore", resets.restore_snapshot, 0.5),
    Fault("everything", processes.kill_anything, 8.0, 4.0),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
