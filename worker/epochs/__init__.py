"""Epochs: derive everything shared from users' samples and publish it."""
