"""Snapshots of a namespace: create, read, restore."""
