"""The mathematics: learners, groups and exploration. Knows torch and numpy, nothing of Redis or HTTP."""
