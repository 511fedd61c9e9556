"""The clients: `Metaban` blocks, `AsyncMetaban` is for asyncio. Both have the same methods.

The methods are made from the functions in `api.py` and `admin.py`, with their arguments and
docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, final

import httpx

from metaban.client import admin, api
from metaban.client.transport import Address, AsyncSender, Lines, Pages, Policy, Sender, Task

P = ParamSpec("P")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


# Methods


class Resource:
    """A group of methods of the blocking client."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender


class AsyncResource:
    """A group of methods of the asyncio client."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender


def sync_call(plan: Callable[P, Task[T]]) -> Callable[Concatenate[Resource, P], T]:
    """A method that makes the call and returns its answer."""

    def method(self: Resource, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._sender.run(plan(*args, **kwargs))

    return _documented(method, plan)


def sync_pages(plan: Callable[P, Pages[T]]) -> Callable[Concatenate[Resource, P], Iterator[T]]:
    """A method that returns the elements of all pages, and requests each page when it is needed."""

    def method(self: Resource, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._sender.iterate(plan(*args, **kwargs))

    return _documented(method, plan)


def sync_lines(plan: Callable[P, Lines[T]]) -> Callable[Concatenate[Resource, P], Iterator[T]]:
    """A method that returns the lines of an answer while it arrives."""

    def method(self: Resource, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._sender.lines(plan(*args, **kwargs))

    return _documented(method, plan)


def async_call(plan: Callable[P, Task[T]]) -> Callable[Concatenate[AsyncResource, P], Coroutine[Any, Any, T]]:
    """The asyncio counterpart of `sync_call`."""

    async def method(self: AsyncResource, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._sender.run(plan(*args, **kwargs))

    return _documented(method, plan)


def async_pages(plan: Callable[P, Pages[T]]) -> Callable[Concatenate[AsyncResource, P], AsyncIterator[T]]:
    """The asyncio counterpart of `sync_pages`."""

    def method(self: AsyncResource, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._sender.iterate(plan(*args, **kwargs))

    return _documented(method, plan)


def async_lines(plan: Callable[P, Lines[T]]) -> Callable[Concatenate[AsyncResource, P], AsyncIterator[T]]:
    """The asyncio counterpart of `sync_lines`."""

    def method(self: AsyncResource, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._sender.lines(plan(*args, **kwargs))

    return _documented(method, plan)


def _documented(method: Method, plan: Callable[..., Any]) -> Method:
    """Give the method the name, docstring and parameters of its plan, for `help` and notebooks."""
    update_wrapper(method, plan)
    planned = inspect.signature(plan)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = planned.replace(
        parameters=[itself, *planned.parameters.values()], return_annotation=inspect.Signature.empty
    )
    vars(method)["__signature__"] = shown
    return method


# The blocking client


@final
class Health(Resource):
    """Health of the service."""

    live = sync_call(api.live)
    ready = sync_call(api.ready)


@final
class Arms(Resource):
    """The catalogue."""

    list = sync_call(admin.list_arms)
    iterate = sync_pages(admin.iterate_arms)
    get = sync_call(admin.get_arm)
    create = sync_call(admin.create_arm)
    put = sync_call(admin.put_arm)
    delete = sync_call(admin.delete_arm)
    import_lines = sync_call(admin.import_lines)
    export = sync_lines(admin.export_arms)


@final
class DeadLetters(Resource):
    """Dead letters."""

    list = sync_call(admin.list_letters)
    iterate = sync_pages(admin.iterate_letters)
    replay = sync_call(admin.replay_letter)
    replay_all = sync_call(admin.replay_letters)
    discard = sync_call(admin.discard_letter)


@final
class Snapshots(Resource):
    """Snapshots."""

    list = sync_call(admin.list_snapshots)
    create = sync_call(admin.create_snapshot)
    restore = sync_call(admin.restore_snapshot)


@final
class Jobs(Resource):
    """Jobs."""

    list = sync_call(admin.list_jobs)
    get = sync_call(admin.get_job)


@final
class Config(Resource):
    """Live settings of the namespace."""

    get = sync_call(admin.get_config)
    patch = sync_call(admin.patch_config)


@final
class Namespaces(Resource):
    """The namespaces of a deployment."""

    list = sync_call(admin.list_namespaces)
    create = sync_call(admin.create_namespace)
    get = sync_call(admin.get_namespace)
    delete = sync_call(admin.delete_namespace)


@final
class Transfer(Resource):
    """Task modeling: which users help a target."""

    overview = sync_call(admin.transfer_overview)
    ask = sync_call(admin.start_transfer)
    get = sync_call(admin.get_transfer)
    wait = sync_call(admin.wait_for_transfer)


@final
class Admin(Resource):
    """Calls that need an admin key."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender)
        self.arms = Arms(sender)
        self.dead_letters = DeadLetters(sender)
        self.snapshots = Snapshots(sender)
        self.jobs = Jobs(sender)
        self.transfer = Transfer(sender)
        self.config = Config(sender)
        self.namespaces = Namespaces(sender)

    groups = sync_call(admin.groups)
    user = sync_call(admin.user)
    forget = sync_call(admin.forget)
    fusion = sync_call(admin.fusion)
    train_fusion = sync_call(admin.train_fusion)
    stream = sync_call(admin.stream)
    calibration = sync_call(admin.calibration)
    wait_for_job = sync_call(admin.wait_for_job)
    audit = sync_call(admin.list_audit)
    iterate_audit = sync_pages(admin.iterate_audit)


@final
class Metaban(Resource):
    """The blocking client; threads may share it. Close it, or use it in a `with` statement.

    `timeout_s` limits one try, `retries` is the number of tries after the first, `deadline_s` limits them together.
    `transport` replaces the transport of httpx, for example for a unix socket.
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
        super().__init__(Sender(address, policy, transport))
        self.health = Health(self._sender)
        self.admin = Admin(self._sender)

    recommend = sync_call(api.recommend)
    recommend_batch = sync_call(api.recommend_batch)
    activate = sync_call(api.activate)
    feedback = sync_call(api.feedback)
    feedback_batch = sync_call(api.feedback_batch)

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


# The asyncio client


@final
class AsyncHealth(AsyncResource):
    """Health of the service."""

    live = async_call(api.live)
    ready = async_call(api.ready)


@final
class AsyncArms(AsyncResource):
    """The catalogue."""

    list = async_call(admin.list_arms)
    iterate = async_pages(admin.iterate_arms)
    get = async_call(admin.get_arm)
    create = async_call(admin.create_arm)
    put = async_call(admin.put_arm)
    delete = async_call(admin.delete_arm)
    import_lines = async_call(admin.import_lines)
    export = async_lines(admin.export_arms)


@final
class AsyncDeadLetters(AsyncResource):
    """Dead letters."""

    list = async_call(admin.list_letters)
    iterate = async_pages(admin.iterate_letters)
    replay = async_call(admin.replay_letter)
    replay_all = async_call(admin.replay_letters)
    discard = async_call(admin.discard_letter)


@final
class AsyncSnapshots(AsyncResource):
    """Snapshots."""

    list = async_call(admin.list_snapshots)
    create = async_call(admin.create_snapshot)
    restore = async_call(admin.restore_snapshot)


@final
class AsyncJobs(AsyncResource):
    """Jobs."""

    list = async_call(admin.list_jobs)
    get = async_call(admin.get_job)


@final
class AsyncConfig(AsyncResource):
    """Live settings of the namespace."""

    get = async_call(admin.get_config)
    patch = async_call(admin.patch_config)


@final
class AsyncNamespaces(AsyncResource):
    """The namespaces of a deployment."""

    list = async_call(admin.list_namespaces)
    create = async_call(admin.create_namespace)
    get = async_call(admin.get_namespace)
    delete = async_call(admin.delete_namespace)


@final
class AsyncTransfer(AsyncResource):
    """Task modeling: which users help a target."""

    overview = async_call(admin.transfer_overview)
    ask = async_call(admin.start_transfer)
    get = async_call(admin.get_transfer)
    wait = async_call(admin.wait_for_transfer)


@final
class AsyncAdmin(AsyncResource):
    """Calls that need an admin key."""

    def __init__(self, sender: AsyncSender) -> None:
        super().__init__(sender)
        self.arms = AsyncArms(sender)
        self.dead_letters = AsyncDeadLetters(sender)
        self.snapshots = AsyncSnapshots(sender)
        self.jobs = AsyncJobs(sender)
        self.transfer = AsyncTransfer(sender)
        self.config = AsyncConfig(sender)
        self.namespaces = AsyncNamespaces(sender)

    groups = async_call(admin.groups)
    user = async_call(admin.user)
    forget = async_call(admin.forget)
    fusion = async_call(admin.fusion)
    train_fusion = async_call(admin.train_fusion)
    stream = async_call(admin.stream)
    calibration = async_call(admin.calibration)
    wait_for_job = async_call(admin.wait_for_job)
    audit = async_call(admin.list_audit)
    iterate_audit = async_pages(admin.iterate_audit)


@final
class AsyncMetaban(AsyncResource):
    """The asyncio client; the tasks of one event loop may share it. Close it, or use it in an `async with` statement.

    The arguments are those of `Metaban`.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        address = Address.of(base_url, key, namespace)
        policy = Policy(str(address.url), timeout_s, retries, deadline_s)
        super().__init__(AsyncSender(address, policy, transport))
        self.health = AsyncHealth(self._sender)
        self.admin = AsyncAdmin(self._sender)

    recommend = async_call(api.recommend)
    recommend_batch = async_call(api.recommend_batch)
    activate = async_call(api.activate)
    feedback = async_call(api.feedback)
    feedback_batch = async_call(api.feedback_batch)

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
