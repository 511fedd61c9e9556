"""The mathematics: learners, groups, exploration. Knows torch and numpy, neither Redis nor HTTP."""
