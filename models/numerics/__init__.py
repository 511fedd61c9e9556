"""Arrays, networks and schedules that all learners share."""
