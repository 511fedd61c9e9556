"""Worlds to play in, made of real or synthetic data."""
