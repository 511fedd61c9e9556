"""Headers that every answer carries, so that no browser and no cache makes anything else of it than it is.

No Strict-Transport-Security: this is plain HTTP, in which browsers ignore it. The proxy that speaks TLS sends it.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import Scope

SECURITY_HEADERS: Final = {
    # Answers hold decisions about people: no cache may keep them, no browser may guess what they are.
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
#: Nothing in an answer is a page that may load or run anything.
CONTENT_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"
#: Except this one, which loads its scripts from a CDN and then the schema from us.
DOCS_PATH: Final = "/docs"
SCHEMA_PATH: Final = "/openapi.json"
DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'unsafe-inline' https://cdn.jsdelivr.net; img-src 'self' data: https://fastapi.tiangolo.com; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def secure(headers: MutableHeaders, scope: Scope) -> None:
    """Add them to an answer; a page that has a policy of its own keeps it."""
    headers.update(SECURITY_HEADERS)
    headers.setdefault("Content-Security-Policy", DOCS_POLICY if scope["path"] == DOCS_PATH else CONTENT_POLICY)
