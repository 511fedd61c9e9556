-- Tell that deliveries are still being worked on, so that nobody takes them over as stalled.
-- KEYS  events
-- ARGV  group, consumer, entry ids ...
-- Reply how many of them are still this consumer's; the others are left to whoever has them
local kept = 0
for i = 3, #ARGV do
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if not pending.err and #pending > 0 then
    -- JUSTID: the time starts anew, the number of deliveries does not change.
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    kept = kept + 1
  end
end
return kept
