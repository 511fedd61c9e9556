"""Recommendations of a shop: slates of five from a catalogue with ids and metadata, and clicks that arrive later."""
