"""State shared by all users of a namespace: epochs, leases, fusion models, transfer jobs."""
