-- Note a decision beside its user, and what its request told of them, unless they are in another incarnation.
-- KEYS  versions, decided, profile, marker, start
-- ARGV  user id, incarnation that was decided for, decision id, how long the decision is kept in ms, profile ('': none),
--       store epoch ('': any), start of the user's learner ('': none), which counts for one who has neither learned nor
--       been given a start yet
-- Reply the incarnation that the user is in, -1 in another store: nothing was written when it is another one
local versions, decided, profile, marker, start = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local user_id, incarnation, decision_id, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

if ARGV[6] ~= '' and redis.call('GET', marker) ~= ARGV[6] then
  return -1
end
local standing = redis.call('HGET', versions, user_id) or '0:0'
local current = tonumber(string.match(standing, '^%d+') or '0')
if current ~= incarnation then
  return current
end
local starts = ARGV[7] ~= '' and string.match(standing, '^%d+:0$')
  and tonumber(redis.call('HGET', start, 'incarnation') or '-1') ~= current
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
if starts then
  redis.call('DEL', start)
  redis.call('HSET', start, 'incarnation', string.format('%.0f', current), 'start', ARGV[7])
end
return current
