-- Rewrite states of users under a newer epoch, each only if its user did not move meanwhile.
-- KEYS  marker, counters, update_log, versions, refit, then `user` for each state
-- ARGV  store epoch, log cap, number of the refit ('': under a published epoch), then for each state: user id,
--       incarnation, version, trail, epoch, state
-- Reply {'store-epoch'} | {'overtaken'} | {'ok', 1 | 0 for each state}
local marker, counters, update_log, versions, refit = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local store_epoch, log_cap, number = ARGV[1], ARGV[2], tonumber(ARGV[3])
local HEAD_KEYS, HEAD_ARGS, STATE_ARGS = 5, 3, 6

if redis.call('GET', marker) ~= store_epoch then
  return {'store-epoch'}
end
-- A trainer that was held up must not write what it derived over what a later one did under the same number.
if number and number < tonumber(redis.call('GET', refit) or '0') then
  return {'overtaken'}
end
local applied = redis.call('HGET', counters, 'applied') or '0'
redis.call('XLEN', update_log)

-- Two rebases may race: a state never goes back to an older epoch.
local reply = {'ok'}
for i = HEAD_KEYS + 1, #KEYS do
  local at = HEAD_ARGS + (i - HEAD_KEYS - 1) * STATE_ARGS + 1
  local same = redis.call('HGET', versions, ARGV[at]) == ARGV[at + 1] .. ':' .. ARGV[at + 2]
    and (redis.call('HGET', KEYS[i], 'trail') or '') == ARGV[at + 3]
  local stored_epoch = tonumber(redis.call('HGET', KEYS[i], 'epoch') or '-1') or -1
  reply[#reply + 1] = (same and stored_epoch <= tonumber(ARGV[at + 4])) and 1 or 0
end
if number then
  redis.call('SET', refit, ARGV[3])
end
for i = HEAD_KEYS + 1, #KEYS do
  if reply[i - HEAD_KEYS + 1] == 1 then
    local at = HEAD_ARGS + (i - HEAD_KEYS - 1) * STATE_ARGS + 1
    redis.call('HSET', KEYS[i], 'epoch', ARGV[at + 4], 'state', ARGV[at + 5])
    redis.call('XADD', update_log, 'MAXLEN', '~', log_cap, '*',
      'u', ARGV[at], 'i', ARGV[at + 1], 'v', ARGV[at + 2], 'e', '', 't', applied)
  end
end
return reply
