"""The server process: start, drain, stop, and its child processes."""
