"""The client for applications: `Metaban` blocks, `AsyncMetaban` is for asyncio, and both have the same methods.

    with Metaban("http://127.0.0.1:8000") as metaban:
        decision = metaban.recommend("ada", {"espresso": [1, 0], "sencha": [0, 1]})
        metaban.feedback(decision.decision_id, 1.0)

Of what is installed it needs httpx alone. Calls are tried again where that is safe (`service.client_core` says when);
what goes wrong is told by the errors of `service.client_errors`. The methods are the functions of
`service.client_calls` and `service.client_admin`, each of which plans a call: arguments are described there.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

import httpx

from service import client_admin as admin
from service import client_calls as calls
from service import client_transfer as transfer
from service.client_core import Policy
from service.client_sending import (
    Address,
    Awaiting,
    AwaitingSender,
    Blocking,
    BlockingSender,
    awaiting,
    awaiting_lines,
    awaiting_pages,
    blocking,
    blocking_lines,
    blocking_pages,
)
from service.client_types import Ask, Reward

__all__ = ["Ask", "AsyncMetaban", "Metaban", "Reward"]


# For threads


@final
class Health(Blocking):
    """Is the service well?"""

    live = blocking(calls.live)
    ready = blocking(calls.ready)


@final
class Arms(Blocking):
    """The catalogue."""

    list = blocking(admin.list_arms)
    iterate = blocking_pages(admin.iterate_arms)
    get = blocking(admin.get_arm)
    create = blocking(admin.create_arm)
    put = blocking(admin.put_arm)
    delete = blocking(admin.delete_arm)
    import_lines = blocking(admin.import_lines)
    export = blocking_lines(admin.export_arms)


@final
class DeadLetters(Blocking):
    """Events that were given up on."""

    list = blocking(admin.list_letters)
    iterate = blocking_pages(admin.iterate_letters)
    replay = blocking(admin.replay_letter)
    replay_all = blocking(admin.replay_letters)
    discard = blocking(admin.discard_letter)


@final
class Snapshots(Blocking):
    """Everything learned, in files."""

    list = blocking(admin.list_snapshots)
    create = blocking(admin.create_snapshot)
    restore = blocking(admin.restore_snapshot)


@final
class Jobs(Blocking):
    """Work that goes on after a request."""

    list = blocking(admin.list_jobs)
    get = blocking(admin.get_job)


@final
class Config(Blocking):
    """Settings that can be changed while the service runs."""

    get = blocking(admin.get_config)
    patch = blocking(admin.patch_config)


@final
class Namespaces(Blocking):
    """The recommenders of a deployment."""

    list = blocking(admin.list_namespaces)
    create = blocking(admin.create_namespace)
    get = blocking(admin.get_namespace)
    delete = blocking(admin.delete_namespace)


@final
class Transfer(Blocking):
    """Which users help a target."""

    overview = blocking(transfer.overview)
    ask = blocking(transfer.ask)
    get = blocking(transfer.get)
    wait = blocking(transfer.wait)


@final
class Admin(Blocking):
    """What needs an admin's key."""

    def __init__(self, sender: BlockingSender) -> None:
        super().__init__(sender)
        self.arms = Arms(sender)
        self.dead_letters = DeadLetters(sender)
        self.snapshots = Snapshots(sender)
        self.jobs = Jobs(sender)
        self.transfer = Transfer(sender)
        self.config = Config(sender)
        self.namespaces = Namespaces(sender)

    groups = blocking(admin.groups)
    user = blocking(admin.user)
    forget = blocking(admin.forget)
    fusion = blocking(admin.fusion)
    train_fusion = blocking(admin.train_fusion)
    stream = blocking(admin.stream)
    calibration = blocking(admin.calibration)
    wait_for_job = blocking(admin.wait_for_job)
    audit = blocking(admin.list_audit)
    iterate_audit = blocking_pages(admin.iterate_audit)


@final
class Metaban(Blocking):
    """A client that blocks; threads may share it. Close it, or use it in a `with`.

    `timeout_s` is for one try, `retries` is how many may follow it, `deadline_s` is for all of them; `transport` is for
    what httpx does not do by itself, such as a unix socket.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        namespace: str | None = None,
        *,
        timeout_s: float = 10.0,
        retries: int = 4,
        deadline_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        address = Address.of(base_url, key, namespace)
        policy = Policy(str(address.url), timeout_s, retries, deadline_s)
        super().__init__(BlockingSender(address, policy, transport))
        self.health = Health(self._sender)
        self.admin = Admin(self._sender)

    recommend = blocking(calls.recommend)
    recommend_batch = blocking(calls.recommend_batch)
    activate = blocking(calls.activate)
    feedback = blocking(calls.feedback)
    feedback_batch = blocking(calls.feedback_batch)

    def close(self) -> None:
        """Close all connections."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Metaban({self._sender.address})"


# For asyncio


@final
class AsyncHealth(Awaiting):
    """Is the service well?"""

    live = awaiting(calls.live)
    ready = awaiting(calls.ready)


@final
class AsyncArms(Awaiting):
    """The catalogue."""

    list = awaiting(admin.list_arms)
    iterate = awaiting_pages(admin.iterate_arms)
    get = awaiting(admin.get_arm)
    create = awaiting(admin.create_arm)
    put = awaiting(admin.put_arm)
    delete = awaiting(admin.delete_arm)
    import_lines = awaiting(admin.import_lines)
    export = awaiting_lines(admin.export_arms)


@final
class AsyncDeadLetters(Awaiting):
    """Events that were given up on."""

    list = awaiting(admin.list_letters)
    iterate = awaiting_pages(admin.iterate_letters)
    replay = awaiting(admin.replay_letter)
    replay_all = awaiting(admin.replay_letters)
    discard = awaiting(admin.discard_letter)


@final
class AsyncSnapshots(Awaiting):
    """Everything learned, in files."""

    list = awaiting(admin.list_snapshots)
    create = awaiting(admin.create_snapshot)
    restore = awaiting(admin.restore_snapshot)


@final
class AsyncJobs(Awaiting):
    """Work that goes on after a request."""

    list = awaiting(admin.list_jobs)
    get = awaiting(admin.get_job)


@final
class AsyncConfig(Awaiting):
    """Settings that can be changed while the service runs."""

    get = awaiting(admin.get_config)
    patch = awaiting(admin.patch_config)


@final
class AsyncNamespaces(Awaiting):
    """The recommenders of a deployment."""

    list = awaiting(admin.list_namespaces)
    create = awaiting(admin.create_namespace)
    get = awaiting(admin.get_namespace)
    delete = awaiting(admin.delete_namespace)


@final
class AsyncTransfer(Awaiting):
    """Which users help a target."""

    overview = awaiting(transfer.overview)
    ask = awaiting(transfer.ask)
    get = awaiting(transfer.get)
    wait = awaiting(transfer.wait)


@final
class AsyncAdmin(Awaiting):
    """What needs an admin's key."""

    def __init__(self, sender: AwaitingSender) -> None:
        super().__init__(sender)
        self.arms = AsyncArms(sender)
        self.dead_letters = AsyncDeadLetters(sender)
        self.snapshots = AsyncSnapshots(sender)
        self.jobs = AsyncJobs(sender)
        self.transfer = AsyncTransfer(sender)
        self.config = AsyncConfig(sender)
        self.namespaces = AsyncNamespaces(sender)

    groups = awaiting(admin.groups)
    user = awaiting(admin.user)
    forget = awaiting(admin.forget)
    fusion = awaiting(admin.fusion)
    train_fusion = awaiting(admin.train_fusion)
    stream = awaiting(admin.stream)
    calibration = awaiting(admin.calibration)
    wait_for_job = awaiting(admin.wait_for_job)
    audit = awaiting(admin.list_audit)
    iterate_audit = awaiting_pages(admin.iterate_audit)


@final
class AsyncMetaban(Awaiting):
    """The client for asyncio, of one loop; the tasks of it may share it. Close it, or use it in an `async with`."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        namespace: str | None = None,
        *,
        timeout_s: float = 10.0,
        retries: int = 4,
        deadline_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        address = Address.of(base_url, key, namespace)
        policy = Policy(str(address.url), timeout_s, retries, deadline_s)
        super().__init__(AwaitingSender(address, policy, transport))
        self.health = AsyncHealth(self._sender)
        self.admin = AsyncAdmin(self._sender)

    recommend = awaiting(calls.recommend)
    recommend_batch = awaiting(calls.recommend_batch)
    activate = awaiting(calls.activate)
    feedback = awaiting(calls.feedback)
    feedback_batch = awaiting(calls.feedback_batch)

    async def close(self) -> None:
        """Close all connections."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncMetaban({self._sender.address})"
