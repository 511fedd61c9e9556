"""Everything that knows Redis: keys, records, streams, scripts and the private Valkey server."""
