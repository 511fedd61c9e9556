-- Forget a consumer, unless deliveries still wait for it: deleting it would drop them from the pending list.
-- KEYS  events
-- ARGV  group, consumer
-- Reply 1 | 0: 0 when something is pending
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err then
  return 1
end
if #pending > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
