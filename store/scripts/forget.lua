-- Forget a user: no state, no samples, no profile, no start, and a tombstone under the next incarnation.
-- KEYS  marker, counters, update_log, versions, user, samples, profile, start
-- ARGV  store epoch, log cap, user id
-- Reply {'store-epoch'} | {'ok', incarnation, samples there were, line of the update log that tells it}
local marker, counters, update_log, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local user, samples, profile, start, user_id = KEYS[5], KEYS[6], KEYS[7], KEYS[8], ARGV[3]

if redis.call('GET', marker) ~= ARGV[1] then
  return {'store-epoch'}
end
local stored = redis.call('HGET', versions, user_id) or '0:0'
local before, version = string.match(stored, '^(%d+):(%d+)$')
if not before then
  return redis.error_reply('the version of the user is damaged')
end
local incarnation = string.format('%.0f', tonumber(before) + 1)
local applied = redis.call('HGET', counters, 'applied') or '0'
redis.call('XLEN', update_log)
local kept = redis.pcall('LLEN', samples)
if type(kept) ~= 'number' then
  kept = 0
end

-- First write: it fails, with nothing written, when `forgotten` is no number or memory is full.
redis.call('HINCRBY', counters, 'forgotten', version)
redis.call('HSET', versions, user_id, incarnation .. ':0')
-- Whatever was stored under these names, of whatever type, is gone.
redis.call('DEL', user, samples, profile, start)
-- `forgot` stays when the user comes back: no snapshot from before brings the old one back.
redis.call('HSET', user, 'incarnation', incarnation, 'version', '0', 'forgot', incarnation)
local line = redis.call('XADD', update_log, 'MAXLEN', '~', ARGV[2], '*',
  'u', user_id, 'i', incarnation, 'v', '0', 'e', '', 't', applied)
return {'ok', incarnation, kept, line}
