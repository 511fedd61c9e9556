-- Apply a batch of events to their users, all or none.
-- KEYS  marker, events, counters, update_log, versions, attempts, then `user`, `samples` for each update
-- ARGV  store id, group, consumer, samples kept, log cap, number of entry ids, how many of them are in an update
--       (the others have no effect), the entry ids, then for each update: user id, expected 'incarnation:version'
--       ('0:0': no record), expected trail, incarnation, version, epoch, state, entry ids joined by commas,
--       trail, number of changed samples, number of new samples, place and sample of each changed one, the new samples
-- Reply {'ok', applied} | {reason, detail}
local marker, events, counters = KEYS[1], KEYS[2], KEYS[3]
local update_log, versions, attempts = KEYS[4], KEYS[5], KEYS[6]
local store_id, group, consumer = ARGV[1], ARGV[2], ARGV[3]
local samples_kept, log_cap = ARGV[4], ARGV[5]
local n_ids, n_effective = tonumber(ARGV[6]), tonumber(ARGV[7])
local HEAD_KEYS, HEAD_ARGS, UPDATE_ARGS = 6, 7, 11

-- Lua does not roll back: check everything that could fail before the first write.
if redis.call('GET', marker) ~= store_id then
  return {'store-id', 'the marker of the partition is missing or of another store'}
end
for i = HEAD_ARGS + 1, HEAD_ARGS + n_ids do
  local pending = redis.pcall('XPENDING', events, group, ARGV[i], ARGV[i], 1, consumer)
  if pending.err or #pending == 0 then
    return {'not-pending', ARGV[i]}
  end
end
local at = HEAD_ARGS + n_ids + 1
for i = HEAD_KEYS + 1, #KEYS, 2 do
  local stored = redis.call('HGET', versions, ARGV[at]) or '0:0'
  if stored ~= ARGV[at + 1] then
    return {'version', 'a user is at ' .. stored .. ', not ' .. ARGV[at + 1]}
  end
  -- A store that lost its latest writes reaches the same version again by other events.
  -- A key of another type raises here, before the first write.
  if (redis.call('HGET', KEYS[i], 'trail') or '') ~= ARGV[at + 2] then
    return {'version', 'a user reached ' .. stored .. ' by other events'}
  end
  local stored_samples, n_changed = redis.call('LLEN', KEYS[i + 1]), tonumber(ARGV[at + 9])
  for c = 0, n_changed - 1 do
    if tonumber(ARGV[at + UPDATE_ARGS + 2 * c]) >= stored_samples then
      return {'version', 'a user has ' .. stored_samples .. ' samples, fewer than before'}
    end
  end
  at = at + UPDATE_ARGS + 2 * n_changed + tonumber(ARGV[at + 10])
end
redis.call('XLEN', update_log)
redis.call('HLEN', attempts)
local voided = redis.call('HGET', counters, 'voided')
if voided and not string.match(voided, '^%d+$') then
  return redis.error_reply('the counter `voided` is not a number')
end

-- First write: fails, with nothing written, if `counters` is not a hash of numbers or memory is full.
local applied = string.format('%.0f', redis.call('HINCRBY', counters, 'applied', n_effective))
if n_effective < n_ids then
  redis.call('HINCRBY', counters, 'voided', n_ids - n_effective)
end
at = HEAD_ARGS + n_ids + 1
for i = HEAD_KEYS + 1, #KEYS, 2 do
  local user_id, incarnation, version, entries = ARGV[at], ARGV[at + 3], ARGV[at + 4], ARGV[at + 7]
  redis.call('HSET', KEYS[i], 'incarnation', incarnation, 'version', version,
    'epoch', ARGV[at + 5], 'state', ARGV[at + 6], 'trail', ARGV[at + 8])
  redis.call('HSET', versions, user_id, incarnation .. ':' .. version)
  local n_changed, n_new = tonumber(ARGV[at + 9]), tonumber(ARGV[at + 10])
  at = at + UPDATE_ARGS
  for c = at, at + 2 * n_changed - 1, 2 do
    redis.call('LSET', KEYS[i + 1], ARGV[c], ARGV[c + 1])
  end
  at = at + 2 * n_changed
  for s = at, at + n_new - 1 do
    redis.call('RPUSH', KEYS[i + 1], ARGV[s])
  end
  redis.call('LTRIM', KEYS[i + 1], '-' .. samples_kept, '-1')
  redis.call('XADD', update_log, 'MAXLEN', '~', log_cap, '*',
    'u', user_id, 'i', incarnation, 'v', version, 'e', entries, 't', applied)
  at = at + n_new
end
for i = HEAD_ARGS + 1, HEAD_ARGS + n_ids do
  redis.call('XACK', events, group, ARGV[i])
  redis.call('XDEL', events, ARGV[i])
  redis.call('HDEL', attempts, ARGV[i])
end
return {'ok', applied}
