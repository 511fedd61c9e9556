-- Replace a decision by its activated form, and add its arms to those waiting for rewards.
-- KEYS  decision, awaiting
-- ARGV  SHA-1 of the decision as it was read, the decision, its time to live in ms, when its rewards are overdue in ms,
--       then the members of `awaiting`
-- Reply 1 | 0 if the stored decision is another one or missing
local decision, awaiting = KEYS[1], KEYS[2]

local stored = redis.call('GET', decision)
if not stored or redis.sha1hex(stored) ~= ARGV[1] then
  return 0
end
redis.call('ZCARD', awaiting)

redis.call('SET', decision, ARGV[2], 'PX', ARGV[3])
for i = 5, #ARGV do
  redis.call('ZADD', awaiting, ARGV[4], ARGV[i])
end
return 1
