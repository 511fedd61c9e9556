-- Delete a consumer, unless entries are pending for it: they would be dropped from the pending list.
-- KEYS  events
-- ARGV  group, consumer
-- Reply 1 | 0 if entries are pending
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err then
  return 1
end
if #pending > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
