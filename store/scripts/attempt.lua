-- Count or uncount a solo attempt on an event that is pending for the consumer.
-- KEYS  events, attempts
-- ARGV  group, consumer, entry id, 1 or -1
-- Reply number of attempts; 0 if the event is gone or not pending for the consumer
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if pending.err or #pending == 0 or #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3]) == 0 then
  return 0
end
return redis.call('HINCRBY', KEYS[2], ARGV[3], ARGV[4])
