-- Put an activated decision in the place of the one that was read, and have it wait for rewards.
-- KEYS  decision, awaiting
-- ARGV  SHA-1 of the decision as it was read, the decision, its time to live in ms, when its rewards are overdue in ms,
--       then the members that wait
-- Reply 1 | 0 when another decision stands there, or none
local decision, awaiting = KEYS[1], KEYS[2]

local standing = redis.call('GET', decision)
if not standing or redis.sha1hex(standing) ~= ARGV[1] then
  return 0
end
redis.call('ZCARD', awaiting)

redis.call('SET', decision, ARGV[2], 'PX', ARGV[3])
for i = 5, #ARGV do
  redis.call('ZADD', awaiting, ARGV[4], ARGV[i])
end
return 1
