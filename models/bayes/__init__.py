"""Bayesian meta-learning: GEM-BML and LLAMA."""
