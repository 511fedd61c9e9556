"""Long jobs under a lease: training fusion models, transfer between users."""
