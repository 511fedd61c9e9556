"""From reward events to user states: consume, fit, publish."""
