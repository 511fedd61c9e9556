"""Every admin request that may change something is written to the audit log."""

from __future__ import annotations

from typing import Final

import pytest
from fastapi.routing import APIRoute

from metaban.service.http.app import ROUTERS, create_app
from metaban.service.http.audit import AuditedRoute
from metaban.service.settings.environment import Settings
from tests.service.scripted_engine import OneEngine, ScriptedEngine

CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

#: Operations ("METHOD /path") that need no line in the audit log, with the reason.
EXEMPT: Final[dict[str, str]] = {}

ROUTES: Final = {
    f"{method} {route.path_format}": route
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
}


def changing_operations() -> list[str]:
    """The operations of the whole app under /admin that are not GET, from its OpenAPI document."""
    document = create_app(Settings(), OneEngine(ScriptedEngine())).openapi()  # type: ignore[arg-type]
    return [
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if path.startswith("/admin/") and method.upper() in CHANGING
    ]


@pytest.mark.parametrize("operation", changing_operations())
def test_changing_admin_routes_are_audited(operation: str) -> None:
    assert operation in EXEMPT or isinstance(ROUTES[operation], AuditedRoute)


def test_the_document_lists_all_admin_routes() -> None:
    """No route is hidden from the document, and with it from the test above."""
    listed = {name for name in ROUTES if name.split()[1].startswith("/admin") and name.split()[0] in CHANGING}
    assert listed == set(changing_operations())
    assert len(listed) >= 14
    assert not EXEMPT.keys() - listed
