"""What all benchmarks share: reports, parallel runs, timing, the learning loop without a store."""
