"""Latency, freshness and hostile clients, measured on real processes."""
