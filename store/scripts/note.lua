-- Note a decision beside its user, and what its request told of them, unless they are in another incarnation.
-- KEYS  versions, decided, profile, marker
-- ARGV  user id, incarnation that was decided for, decision id, how long the decision is kept in ms, profile ('': none),
--       store epoch ('': any)
-- Reply the incarnation that the user is in, -1 in another store: nothing was written when it is another one
local versions, decided, profile, marker = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local user_id, incarnation, decision_id, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

if ARGV[6] ~= '' and redis.call('GET', marker) ~= ARGV[6] then
  return -1
end
local current = tonumber(string.match(redis.call('HGET', versions, user_id) or '0:0', '^%d+') or '0')
if current ~= incarnation then
  return current
end
-- The server's clock, by which the decision expires: those of services differ, and their windows may have changed.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- First write: it fails, with nothing written, when `decided` is of another type or memory is full.
redis.call('ZADD', decided, string.format('%.0f', now_ms + ttl_ms), decision_id)
redis.call('ZREMRANGEBYSCORE', decided, '-inf', '(' .. string.format('%.0f', now_ms))
local last = redis.call('ZRANGE', decided, -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', decided, string.format('%.0f', last[2]))
if ARGV[5] ~= '' then
  redis.call('SET', profile, ARGV[5])
end
return current
