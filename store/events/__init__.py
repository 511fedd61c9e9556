"""Reward events: the streams of a namespace and their dead letters."""
