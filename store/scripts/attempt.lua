-- Count an attempt made on one event alone, or take one back; nothing is counted for an event that is gone.
-- KEYS  events, attempts
-- ARGV  entry id, 1 or -1
-- Reply the number of attempts, 0 when the event is gone
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
return redis.call('HINCRBY', KEYS[2], ARGV[1], ARGV[2])
