-- Keep a stored decision, now in the index of its user, and add its arms to those waiting for rewards.
-- KEYS  decision, awaiting
-- ARGV  SHA-1 of its record, in hex, its time to live in ms, when its rewards are overdue in ms, then the members of
--       `awaiting`
-- Reply 1 | 0 if the record is missing or another one
local decision, awaiting = KEYS[1], KEYS[2]

local stored = redis.call('GET', decision)
if not stored or redis.sha1hex(stored) ~= ARGV[1] then
  return 0
end
-- First write: fails, with nothing written, if `awaiting` is of another type or memory is full.
for i = 4, #ARGV do
  redis.call('ZADD', awaiting, ARGV[3], ARGV[i])
end
redis.call('PEXPIRE', decision, ARGV[2])
return 1
