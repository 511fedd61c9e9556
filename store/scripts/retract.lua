-- Delete a decision, if it is still the one that was read; what waits for rewards of it waits no more.
-- KEYS  decision, awaiting
-- ARGV  SHA-1 of its record, in hex, decision id, most arms that a decision has
-- Reply 1 | 0: 0 when it is gone or another one
local decision, awaiting = KEYS[1], KEYS[2]

local stored = redis.call('GET', decision)
if not stored or redis.sha1hex(stored) ~= ARGV[1] then
  return 0
end
if redis.call('ZCARD', awaiting) > 0 then
  for rank = 1, tonumber(ARGV[3]) do
    redis.call('ZREM', awaiting, rank .. ':' .. ARGV[2])
  end
end
redis.call('DEL', decision)
return 1
