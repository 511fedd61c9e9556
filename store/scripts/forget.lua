-- Forget a user: delete state, samples, profile and warm start; leave a tombstone with the next incarnation.
-- KEYS  marker, counters, update_log, versions, user, samples, profile, start, replaced, last_seen
-- ARGV  store id, log cap, user id, day ('': forget in any case)
-- Reply {'store-id'} | {'seen'}: the latest decision was after the day, or is unknown; nothing was written
--       {'ok', incarnation, number of samples deleted, cursor of the line in the update log ('': no tombstone)}
local marker, counters, update_log, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local user, samples, profile, start, replaced, last_seen = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local user_id, day = ARGV[3], tonumber(ARGV[4])

if redis.call('GET', marker) ~= ARGV[1] then
  return {'store-id'}
end
local stored = redis.call('HGET', versions, user_id) or '0:0'
local before, version = string.match(stored, '^(%d+):(%d+)$')
if not before then
  return redis.error_reply('the version of the user is damaged')
end
local seen = redis.call('ZSCORE', last_seen, user_id)
if day and (not seen or tonumber(seen) > day) then
  return {'seen'}
end
if day and version == '0' then
  -- No rewards are learned and no decision is kept: there is nothing that a new incarnation would have to refuse.
  redis.call('HINCRBY', counters, 'expired', 1)
  redis.call('DEL', profile, start)
  redis.call('ZREM', last_seen, user_id)
  return {'ok', before, 0, ''}
end
local incarnation = string.format('%.0f', tonumber(before) + 1)
local applied = redis.call('HGET', counters, 'applied') or '0'
redis.call('XLEN', update_log)
redis.call('HLEN', replaced)
local kept = redis.pcall('LLEN', samples)
if type(kept) ~= 'number' then
  kept = 0
end

-- First write: fails, with nothing written, if `forgotten` is not a number or memory is full.
redis.call('HINCRBY', counters, 'forgotten', version)
if day then
  redis.pcall('HINCRBY', counters, 'expired', 1) -- for monitoring only
end
redis.call('HSET', versions, user_id, incarnation .. ':0')
redis.call('DEL', user, samples, profile, start)
redis.call('HDEL', replaced, user_id)
redis.call('ZREM', last_seen, user_id)
-- `forgot` stays if the user comes back, so that no earlier snapshot restores the old data.
redis.call('HSET', user, 'incarnation', incarnation, 'version', '0', 'forgot', incarnation)
local line = redis.call('XADD', update_log, 'MAXLEN', '~', ARGV[2], '*',
  'u', user_id, 'i', incarnation, 'v', '0', 'e', '', 't', applied)
return {'ok', incarnation, kept, line}
