"""The background process: consumes reward events, trains learners, derives shared state."""
