"""Benchmarks: what the documentation claims, measured."""
