"""The learner that ships: user heads under a learned prior, on top of a shared trunk."""
