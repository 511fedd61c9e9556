"""POST /recommend in the engine: from a command to a stored decision."""
