"""What the documentation claims, measured."""
