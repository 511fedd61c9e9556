"""The HTTP layer: protocol limits, admission, authentication, parsing, routes, problem documents."""
