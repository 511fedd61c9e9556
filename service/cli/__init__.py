"""The `metaban` command: one module for each sub-command."""
