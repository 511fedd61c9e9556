"""Stored decisions, the index of a user's decisions, and decisions that wait for a default reward."""
