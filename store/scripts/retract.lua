-- Delete a decision if its record is the given one, and remove its arms from those waiting for rewards.
-- KEYS  decision, awaiting
-- ARGV  SHA-1 of its record, in hex, decision id, most arms of a decision
-- Reply 1 | 0 if the record is missing or another one
local decision, awaiting = KEYS[1], KEYS[2]

local stored = redis.call('GET', decision)
if not stored or redis.sha1hex(stored) ~= ARGV[1] then
  return 0
end
-- A damaged `awaiting` must not keep the decision.
local waiting = redis.pcall('ZCARD', awaiting)
if type(waiting) == 'number' and waiting > 0 then
  for rank = 1, tonumber(ARGV[3]) do
    redis.call('ZREM', awaiting, rank .. ':' .. ARGV[2])
  end
end
redis.call('DEL', decision)
return 1
