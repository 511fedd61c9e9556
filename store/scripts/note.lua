-- Add a decision to the index of its user, with profile and warm start, unless the user has another incarnation.
-- KEYS  versions, decided, profile, marker, start, last_seen
-- ARGV  user id, incarnation of the decision, decision id, time to live of the decision in ms, profile ('': none), store
--       id ('': any), warm start ('': none), which is written if the user has neither applied rewards nor a warm start
-- Reply current incarnation of the user, -1 in another store; nothing was written unless it is that of the decision
local versions, decided, profile, marker, start, last_seen = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local user_id, incarnation, decision_id, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

if ARGV[6] ~= '' and redis.call('GET', marker) ~= ARGV[6] then
  return -1
end
local stored = redis.call('HGET', versions, user_id) or '0:0'
local current = tonumber(string.match(stored, '^%d+') or '0')
if current ~= incarnation then
  return current
end
local write_start = ARGV[7] ~= '' and string.match(stored, '^%d+:0$')
  and tonumber(redis.call('HGET', start, 'incarnation') or '-1') ~= current
-- By the clock of the server, as the expiry of the decision: clocks of services differ.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local today = string.format('%.0f', math.floor(now_ms / 86400000))
-- By the day: a user who asks often causes one write a day.
local first_today = redis.call('ZSCORE', last_seen, user_id) ~= today

-- First write: fails, with nothing written, if `decided` is of another type or memory is full.
redis.call('ZADD', decided, string.format('%.0f', now_ms + ttl_ms), decision_id)
redis.call('ZREMRANGEBYSCORE', decided, '-inf', '(' .. string.format('%.0f', now_ms))
local last = redis.call('ZRANGE', decided, -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', decided, string.format('%.0f', last[2]))
if first_today then
  redis.call('ZADD', last_seen, today, user_id)
end
if ARGV[5] ~= '' then
  redis.call('SET', profile, ARGV[5])
end
if write_start then
  redis.call('DEL', start)
  redis.call('HSET', start, 'incarnation', string.format('%.0f', current), 'start', ARGV[7])
end
return current
