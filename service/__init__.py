"""The HTTP service: requests in, decisions and acknowledged rewards out; and the `metaban` command."""
