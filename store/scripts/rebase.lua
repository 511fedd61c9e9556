-- Rewrite states of users under a newer epoch, each only if its user did not move meanwhile.
-- KEYS  marker, counters, update_log, versions, then `user` for each state
-- ARGV  store epoch, log cap, then for each state: user id, incarnation, version, epoch, state
-- Reply {'store-epoch'} | {'ok', 1 | 0 for each state}
local marker, counters, update_log, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local store_epoch, log_cap = ARGV[1], ARGV[2]
local HEAD_KEYS, HEAD_ARGS, STATE_ARGS = 4, 2, 5

if redis.call('GET', marker) ~= store_epoch then
  return {'store-epoch'}
end
local applied = redis.call('HGET', counters, 'applied') or '0'
redis.call('XLEN', update_log)

-- Two rebases may race: a state never goes back to an older epoch.
local reply = {'ok'}
for i = HEAD_KEYS + 1, #KEYS do
  local at = HEAD_ARGS + (i - HEAD_KEYS - 1) * STATE_ARGS + 1
  local same = redis.call('HGET', versions, ARGV[at]) == ARGV[at + 1] .. ':' .. ARGV[at + 2]
  local stored_epoch = tonumber(redis.call('HGET', KEYS[i], 'epoch') or '-1') or -1
  reply[#reply + 1] = (same and stored_epoch <= tonumber(ARGV[at + 3])) and 1 or 0
end
for i = HEAD_KEYS + 1, #KEYS do
  if reply[i - HEAD_KEYS + 1] == 1 then
    local at = HEAD_ARGS + (i - HEAD_KEYS - 1) * STATE_ARGS + 1
    redis.call('HSET', KEYS[i], 'epoch', ARGV[at + 3], 'state', ARGV[at + 4])
    redis.call('XADD', update_log, 'MAXLEN', '~', log_cap, '*',
      'u', ARGV[at], 'i', ARGV[at + 1], 'v', ARGV[at + 2], 'e', '', 't', applied)
  end
end
return reply
