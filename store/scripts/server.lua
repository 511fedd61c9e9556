-- Id of the running server: another after a restart, or when another server took over; writes nothing.
-- KEYS  any key of the server
-- Reply id
return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or ''
