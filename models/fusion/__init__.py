"""Model fusion: warm starts of new users from their profiles."""
