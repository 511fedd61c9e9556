"""The background process: learns from reward events and derives shared state."""
