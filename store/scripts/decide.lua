-- Store a decision that waits for rewards, unless its id is taken.
-- KEYS  decision, awaiting
-- ARGV  the decision, its time to live in ms, when its rewards are overdue in ms, then the members that wait
-- Reply false when it was stored, otherwise the decision that holds
local decision, awaiting = KEYS[1], KEYS[2]

local standing = redis.call('GET', decision)
if standing then
  return standing
end
redis.call('ZCARD', awaiting)

redis.call('SET', decision, ARGV[1], 'PX', ARGV[2])
for i = 4, #ARGV do
  redis.call('ZADD', awaiting, ARGV[3], ARGV[i])
end
return false
