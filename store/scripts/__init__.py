"""The Lua scripts: each touches only keys it is given, all of one hash tag, and checks before it writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, TypeAlias, final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from store.connection import Argument, Command, Confirmation, Store, pipeline, pipeline_with_errors
from store.errors import translate_errors

ScriptName: TypeAlias = Literal[
    "activate",
    "apply",
    "arm_changes",
    "arm_range",
    "attempt",
    "attend",
    "audit",
    "begin_restore",
    "bury",
    "change_arms",
    "collect",
    "decide",
    "enqueue",
    "finish_restore",
    "forget",
    "fusion_job",
    "fusion_request",
    "lease",
    "namespace",
    "note",
    "publish",
    "publish_fusion",
    "rebase",
    "refit",
    "release",
    "replay",
    "restore",
    "retract",
    "search",
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
    """A script of this package, called by its digest; the server is sent the source when it lacks it."""

    def __init__(self, redis: Store, name: ScriptName) -> None:
        self.name = name
        self._redis = redis
        self._source = _source(name)
        # The digest names a script to the server; it protects nothing.
        self._digest = sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run once; the raw reply."""
        return (await self.call_many([(keys, arguments)]))[0]

    async def call_many(self, calls: Iterable[ScriptCall], *, confirm: Confirmation | None = None) -> list[Any]:
        """Run once for each (keys, arguments), all in one round trip; the first error is raised.

        With `confirm`, NotReplicated unless enough replicas have all that was written.
        """
        queue = list(calls)
        known = [self._command("EVALSHA", *call) for call in queue]
        replies = await pipeline_with_errors(self._redis, known, confirm=confirm)
        # NOSCRIPT runs nothing, so sending those again cannot do the work twice.
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = [self._command("EVAL", *queue[at]) for at in unknown]
            answers = await pipeline_with_errors(self._redis, again, confirm=confirm)
            for at, reply in zip(unknown, answers, strict=True):
                replies[at] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                with translate_errors():
                    raise reply
        return replies

    async def call_after(self, first: Command, keys: Sequence[str], arguments: Sequence[Argument]) -> tuple[Any, Any]:
        """Send a command, then run once; both raw replies, the first error raised.

        That is one round trip where one server does both in turn. Those of a cluster would do them in any order: there
        the script is not sent before the command is answered.
        """
        if not isinstance(self._redis, Redis):
            [reply] = await pipeline(self._redis, [first])
            return reply, await self.call(keys, arguments)
        known = self._command("EVALSHA", keys, arguments)
        replies = await pipeline_with_errors(self._redis, [first, known])
        if isinstance(replies[1], NoScriptError):
            replies[1:] = await pipeline_with_errors(self._redis, [self._command("EVAL", keys, arguments)])
        for reply in replies:
            if isinstance(reply, Exception):
                with translate_errors():
                    raise reply
        return replies[0], replies[1]

    def inline(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Command:
        """The command that runs it whether the server knows it or not, to be sent among others."""
        return self._command("EVAL", keys, arguments)

    def _command(self, verb: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Argument]:
        body = self._digest if verb == "EVALSHA" else self._source
        return [verb, body, len(keys), *keys, *arguments]


def load_script(redis: Store, name: ScriptName) -> Script:
    """The script `name`.lua, bound to a client."""
    return Script(redis, name)


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
