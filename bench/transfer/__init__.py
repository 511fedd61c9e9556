"""Benchmarks of task modeling and of weights of users."""
