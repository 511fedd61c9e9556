"""One module a resource; each offers a `router`."""
