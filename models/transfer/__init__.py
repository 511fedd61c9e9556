"""Task modeling: which users help the learner of a target user."""
