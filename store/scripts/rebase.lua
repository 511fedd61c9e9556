-- Rewrite states of users under a newer epoch, each only if its user was not updated meanwhile.
-- The states that a refit replaces before its epoch is published are kept: services serve them until then.
-- KEYS  marker, counters, update_log, versions, refit, replaced, then `user` for each state
-- ARGV  store id, log cap, number of the refit ('': under a published epoch), then for each state: user id,
--       incarnation, version, trail, epoch, state
-- Reply {'store-id'} | {'overtaken'} | {'ok', 1 | 0 for each state}
local marker, counters, update_log = KEYS[1], KEYS[2], KEYS[3]
local versions, refit, replaced = KEYS[4], KEYS[5], KEYS[6]
local store_id, log_cap, number = ARGV[1], ARGV[2], tonumber(ARGV[3])
local HEAD_KEYS, HEAD_ARGS, STATE_ARGS = 6, 3, 6

if redis.call('GET', marker) ~= store_id then
  return {'store-id'}
end
-- A delayed trainer must not overwrite the states of a later one with the same epoch number.
if number and number < tonumber(redis.call('GET', refit) or '0') then
  return {'overtaken'}
end
local applied = redis.call('HGET', counters, 'applied') or '0'
redis.call('XLEN', update_log)
redis.call('HLEN', replaced)

-- Two rebases may race: a state never returns to an older epoch.
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
  redis.call('PERSIST', replaced)
end
for i = HEAD_KEYS + 1, #KEYS do
  if reply[i - HEAD_KEYS + 1] == 1 then
    local at = HEAD_ARGS + (i - HEAD_KEYS - 1) * STATE_ARGS + 1
    local epoch, state = unpack(redis.call('HMGET', KEYS[i], 'epoch', 'state'))
    -- A state of this epoch is of a trainer that died: services do not serve it, but what it replaced.
    if number and epoch and state and epoch ~= ARGV[at + 4] then
      local version = ARGV[at + 1] .. ':' .. ARGV[at + 2]
      redis.call('HSET', replaced, ARGV[at], version .. ':' .. epoch .. ':' .. state)
    end
    redis.call('HSET', KEYS[i], 'epoch', ARGV[at + 4], 'state', ARGV[at + 5])
    redis.call('XADD', update_log, 'MAXLEN', '~', log_cap, '*',
      'u', ARGV[at], 'i', ARGV[at + 1], 'v', ARGV[at + 2], 'e', '', 't', applied)
  end
end
return reply
