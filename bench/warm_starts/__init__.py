"""Benchmarks of warm starts by model fusion."""
