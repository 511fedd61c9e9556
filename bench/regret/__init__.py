"""Regret of the learners and of tuned baselines in the same worlds."""
