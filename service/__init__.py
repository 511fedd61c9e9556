"""The HTTP edge: routes, scoring, the replica of served parameters, and the command line."""
