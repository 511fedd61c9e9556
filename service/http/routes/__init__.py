"""The routes, one module for each resource; each defines a `router`."""
