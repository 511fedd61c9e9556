"""The engine of a namespace, without HTTP: recommendations, feedback, administration."""
