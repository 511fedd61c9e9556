"""Settings: of the environment, and of one namespace at run time."""
