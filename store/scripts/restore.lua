-- Restore users of a partition from a snapshot, or drop those who are not in it.
-- KEYS  marker, counters, update_log, versions, restored, then `user`, `samples`, `start` for each user
-- ARGV  store id, generation of the restore, log cap, least number of applied events,
--       then for each user: user id, incarnation, version, epoch, state ('': drop), warm start ('': none), number of samples,
--       the samples
-- Reply {'store-id'} | {'overtaken', generation} | {'corrupt'}: nothing was written
--       {'ok', 1 | 0 for each user}: 0 for a user who was forgotten and stays so, or had no state to drop
local marker, counters, update_log, versions, restored = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local store_id, generation, log_cap, least = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local HEAD_KEYS, HEAD_ARGS, USER_ARGS = 5, 4, 7

if redis.call('GET', marker) ~= store_id then
  return {'store-id'}
end
-- A delayed restore must not write after a later one began.
local latest = redis.call('GET', restored) or '0'
if tonumber(latest) > tonumber(generation) then
  return {'overtaken', latest}
end
local applied = tonumber(redis.call('HGET', counters, 'applied') or '0')
redis.call('XLEN', update_log)
local reply, raised, returning, forgotten, undone = {'ok'}, {}, {}, {}, 0
local at = HEAD_ARGS + 1
for i = HEAD_KEYS + 1, #KEYS, 3 do
  local incarnation, version = string.match(redis.call('HGET', versions, ARGV[at]) or '0:0', '^(%d+):(%d+)$')
  if not incarnation then
    return {'corrupt'}
  end
  redis.call('LLEN', KEYS[i + 1])
  raised[#raised + 1] = string.format('%.0f', math.max(tonumber(incarnation), tonumber(ARGV[at + 1])) + 1)
  local kept = ARGV[at + 4] ~= ''
  local forgot = redis.call('HGET', KEYS[i], 'forgot')
  -- A user who was forgotten after the snapshot, by the incarnations, stays forgotten.
  local returns = kept and not (forgot and tonumber(ARGV[at + 1]) < tonumber(forgot))
  returning[#returning + 1], forgotten[#forgotten + 1] = returns, forgot
  reply[#reply + 1] = (returns or not kept and redis.call('HEXISTS', KEYS[i], 'state') == 1) and 1 or 0
  undone = undone + tonumber(version)
  if returns then
    undone = undone - tonumber(ARGV[at + 2])
  end
  at = at + USER_ARGS + tonumber(ARGV[at + 6])
end

-- First write: fails, with nothing written, if `counters` is not a hash of numbers or memory is full.
if applied < least then
  redis.call('HINCRBY', counters, 'applied', string.format('%.0f', least - applied))
  redis.call('HINCRBY', counters, 'enqueued', string.format('%.0f', least - applied))
  undone = undone + least - applied
  applied = least
end
-- applied = Σ versions + forgotten
redis.call('HINCRBY', counters, 'forgotten', string.format('%.0f', undone))
redis.call('SET', restored, generation)
at = HEAD_ARGS + 1
for i = HEAD_KEYS + 1, #KEYS, 3 do
  local place = (i - HEAD_KEYS + 2) / 3
  local user_id, incarnation, version, n_samples = ARGV[at], raised[place], '0', tonumber(ARGV[at + 6])
  redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
  if returning[place] then
    version = ARGV[at + 2]
    redis.call('HSET', KEYS[i], 'epoch', ARGV[at + 3], 'state', ARGV[at + 4])
    for s = at + USER_ARGS, at + USER_ARGS + n_samples - 1 do
      redis.call('RPUSH', KEYS[i + 1], ARGV[s])
    end
    if ARGV[at + 5] ~= '' then
      redis.call('HSET', KEYS[i + 2], 'incarnation', incarnation, 'start', ARGV[at + 5])
    end
  end
  redis.call('HSET', KEYS[i], 'incarnation', incarnation, 'version', version)
  if forgotten[place] then
    redis.call('HSET', KEYS[i], 'forgot', forgotten[place])
  end
  redis.call('HSET', versions, user_id, incarnation .. ':' .. version)
  redis.call('XADD', update_log, 'MAXLEN', '~', log_cap, '*', 'u', user_id, 'i', incarnation, 'v', version,
    'e', '', 't', string.format('%.0f', applied))
  at = at + USER_ARGS + n_samples
end
return reply
