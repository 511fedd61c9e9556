"""Benchmarks of Bayesian meta-learning, Thompson sampling and calibration."""
