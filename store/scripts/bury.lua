-- Move an event to the dead letters, or drop it if it is of an earlier incarnation of its user.
-- KEYS  events, dead_letters, attempts, counters, versions
-- ARGV  group, consumer, entry id, reason, time in ms, most fields kept
-- Reply 1 | 0 if the event is not pending for this consumer: nothing was written
local events, dead_letters, attempts, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, entry_id = ARGV[1], ARGV[2], ARGV[3]

local pending = redis.pcall('XPENDING', events, group, entry_id, entry_id, 1, consumer)
if pending.err or #pending == 0 then
  return 0
end
local found = redis.call('XRANGE', events, entry_id, entry_id)
local tries = redis.call('HGET', attempts, entry_id) or '0'
redis.call('XLEN', dead_letters)
-- An entry deleted by hand while pending has no fields; its dead letter still has the reason.
local fields = found[1] and found[1][2] or {}
local user_id, incarnation = nil, 0
for at = 1, #fields, 2 do
  if fields[at] == 'u' then
    user_id = fields[at + 1]
  elseif fields[at] == 'i' then
    incarnation = tonumber(fields[at + 1]) or 0
  end
end
-- A dead letter would keep data of a forgotten user that can never be learned.
local began = user_id and string.match(redis.call('HGET', KEYS[5], user_id) or '0:0', '^%d+')
local void = began and incarnation < tonumber(began)

redis.call('HINCRBY', counters, void and 'voided' or 'buried', 1)
if not void then
  -- An entry of unknown format may have more fields than one call accepts: keep the first ones.
  local kept = math.min(#fields, 2 * tonumber(ARGV[6]))
  redis.call('XADD', dead_letters, '*', 'dead_reason', ARGV[4], 'dead_entry', entry_id,
    'dead_consumer', consumer, 'dead_attempts', tries, 'dead_ms', ARGV[5], unpack(fields, 1, kept))
end
redis.call('XACK', events, group, entry_id)
redis.call('XDEL', events, entry_id)
redis.call('HDEL', attempts, entry_id)
return 1
