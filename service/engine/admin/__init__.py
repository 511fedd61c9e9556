"""Administration of a namespace: arms, users, groups, warm starts, transfer, snapshots, jobs."""
