-- Count an attempt made on one event alone, or take one back; only for whoever the event is pending for.
-- KEYS  events, attempts
-- ARGV  group, consumer, entry id, 1 or -1
-- Reply the number of attempts, 0 when the event is gone or somebody else's
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if pending.err or #pending == 0 or #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3]) == 0 then
  return 0
end
return redis.call('HINCRBY', KEYS[2], ARGV[3], ARGV[4])
