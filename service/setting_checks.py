"""Checks of settings that are texts of a certain form: addresses, digests of keys, hosts and origins."""

from __future__ import annotations

import json
import re
from typing import Any, Final

STORE_SCHEMES: Final = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")
#: A SHA-256 digest as `metaban key` prints it, perhaps behind the one namespace that its key is good for.
DIGEST_PATTERN: Final = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,39}:)?[0-9a-f]{64}")
#: A name, an IPv4 address, or an IPv6 address in brackets, as in a Host header without its port.
HOST_PATTERN: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,252}[a-z0-9])?|\[[0-9a-f:.]+\]")
ORIGIN_PATTERN: Final = re.compile(r"https?://[a-z0-9][a-z0-9.-]*(:\d{1,5})?|https?://\[[0-9a-f:.]+\](:\d{1,5})?")


def known_scheme(url: str | None) -> str | None:
    """An address of a store."""
    # The value is not repeated in the message: it may hold a password.
    if url is not None and not url.startswith(STORE_SCHEMES):
        raise ValueError(f"must start with {', '.join(STORE_SCHEMES[:-1])} or {STORE_SCHEMES[-1]}")
    return url


def split_words(value: Any) -> Any:
    """Words of a text, separated by commas or spaces, or a JSON list of them."""
    if not isinstance(value, str):
        return value
    # A JSON list, or the address of a host in brackets.
    if value.lstrip().startswith('["') or value.strip() == "[]":
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("looks like a JSON list and is not one; separate values by commas") from None
    return [part for part in re.split(r"[,\s]+", value) if part]


def digests_only(digests: frozenset[str]) -> frozenset[str]:
    """Digests of keys, in lower case."""
    lowered = frozenset(digest.lower() for digest in digests)
    if any(not DIGEST_PATTERN.fullmatch(digest) for digest in lowered):
        raise ValueError(
            "must hold SHA-256 digests of 64 hex digits, not the keys, each alone or as namespace:digest; "
            "`metaban key` prints both"
        )
    return lowered


def hosts_only(hosts: frozenset[str]) -> frozenset[str]:
    """Names of hosts, in lower case."""
    lowered = frozenset(host.lower() for host in hosts)
    if any(not HOST_PATTERN.fullmatch(host) for host in lowered):
        raise ValueError("must hold names or addresses without a scheme and a port, such as api.example.com")
    return lowered


def origins_only(origins: frozenset[str]) -> frozenset[str]:
    """Origins of web pages, or all."""
    if any(origin != "*" and not ORIGIN_PATTERN.fullmatch(origin) for origin in origins):
        raise ValueError("must hold origins as browsers send them, such as https://shop.example.com, or *")
    return origins
