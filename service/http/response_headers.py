"""Security headers of every response.

No Strict-Transport-Security: browsers ignore it over plain HTTP. The proxy that terminates TLS sends it.
"""

from __future__ import annotations

from typing import Final

SECURITY_HEADERS: Final = {
    # Responses hold decisions about people: no cache may store them.
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

#: No response but /docs is a page that loads or runs anything.
CONTENT_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"

#: /docs loads its scripts from a CDN and the schema from here.
DOCS_PATH: Final = "/docs"

SCHEMA_PATH: Final = "/openapi.json"

DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'unsafe-inline' https://cdn.jsdelivr.net; img-src 'self' data: https://fastapi.tiangolo.com; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
