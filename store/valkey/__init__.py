"""The private Valkey server that `metaban serve` starts when no Redis is configured."""
