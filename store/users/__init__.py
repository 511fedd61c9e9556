"""State of users: parameters, samples, profiles, warm starts; and forgetting a user."""
