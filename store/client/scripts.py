"""Runs the Lua scripts of `store/scripts/`.

Each script uses only the keys it is given, all of one hash tag, and checks everything before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, TypeAlias, final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from metaban.store.client.connection import Store, pipeline, pipeline_with_errors
from metaban.store.client.node import Argument, Command, Confirmation
from metaban.store.errors import raise_translated

ScriptName: TypeAlias = Literal[
    "activate",
    "apply",
    "arm_changes",
    "arm_range",
    "attempt",
    "audit",
    "begin_restore",
    "bury",
    "change_arms",
    "collect",
    "enqueue",
    "finish_restore",
    "forget",
    "fusion_job",
    "fusion_request",
    "keep",
    "lease",
    "namespace",
    "note",
    "owners",
    "publish",
    "publish_fusion",
    "rebase",
    "refit",
    "release",
    "replay",
    "restore",
    "retract",
    "search",
    "server",
    "share",
    "status",
    "strike",
    "strike_fusion",
    "strike_transfer",
    "transfer_job",
    "transfer_request",
    "unlink",
]

ScriptCall: TypeAlias = tuple[Sequence[str], Sequence[Argument]]


@final
class Script:
    """A script of this package, called by its digest; its source is sent if the server does not know it."""

    def __init__(self, redis: Store, name: ScriptName) -> None:
        self.name = name
        self._redis = redis
        self._source = _source(name)
        self._digest = sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run once and return the raw reply."""
        return (await self.call_many([(keys, arguments)]))[0]

    async def call_many(self, calls: Iterable[ScriptCall], *, confirm: Confirmation | None = None) -> list[Any]:
        """Run once for each (keys, arguments), all in one round trip. Raises the first error.

        With `confirm`, raises NotReplicated unless enough replicas have all writes.
        """
        queue = list(calls)
        known = [self._command("EVALSHA", *call) for call in queue]
        replies = await pipeline_with_errors(self._redis, known, confirm=confirm)
        # NOSCRIPT means that nothing ran, so these calls can be sent again.
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = [self._command("EVAL", *queue[at]) for at in unknown]
            answers = await pipeline_with_errors(self._redis, again, confirm=confirm)
            for at, reply in zip(unknown, answers, strict=True):
                replies[at] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise_translated(reply)
        return replies

    async def call_between(
        self,
        first: Command,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        last: Command,
        *,
        accepts: Callable[[Any], bool],
    ) -> tuple[Any, Any, Any]:
        """Send a command, run the script once, and send another command if its reply is accepted.

        Returns the raw replies; raises the first error. One round trip on a single server, where the last command is
        sent in any case. Servers of a cluster do not keep the order: there each step waits for the reply of the one
        before, and the last reply is None if it was not sent.
        """
        if not isinstance(self._redis, Redis):
            [before] = await pipeline(self._redis, [first])
            reply = await self.call(keys, arguments)
            [after] = await pipeline(self._redis, [last]) if accepts(reply) else [None]
            return before, reply, after
        known = self._command("EVALSHA", keys, arguments)
        replies = await pipeline_with_errors(self._redis, [first, known, last])
        if isinstance(replies[1], NoScriptError):
            again = [self._command("EVAL", keys, arguments), last]
            replies[1:] = await pipeline_with_errors(self._redis, again)
        for reply in replies:
            if isinstance(reply, Exception):
                raise_translated(reply)
        return replies[0], replies[1], replies[2]

    def inline(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Command:
        """EVAL command with the source, to be sent in a pipeline with others."""
        return self._command("EVAL", keys, arguments)

    def _command(self, verb: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Argument]:
        body = self._digest if verb == "EVALSHA" else self._source
        return [verb, body, len(keys), *keys, *arguments]


def load_script(redis: Store, name: ScriptName) -> Script:
    """Script `name`.lua, bound to a client."""
    return Script(redis, name)


@cache
def _source(name: str) -> str:
    return files("metaban.store").joinpath("scripts", f"{name}.lua").read_text("utf-8")
