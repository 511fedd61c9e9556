-- Write or remove arms of the catalogue, all or none; removed arms leave tombstones.
-- KEYS  namespace, catalogue, catalogue_log, arms, arm_order, arm_versions, arm_changes, arm_removals
-- ARGV  store id, stamp, time in ms, most arms, most tombstones, most stamps, then for each arm, of distinct ids:
--       id, expected version ('' for any, '0' for none), features ('' to remove it)
-- Reply {'ok', then for each arm its version before (0 for none) and after} | {'reset'} | {'corrupt', id}
--       | {'version', index of the arm, its version} | {'full', number of arms}: nothing was written
local HEAD, FIELDS = 6, 3
local catalogue, log, arms, order, versions, changes, removals =
  KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]

local function text(number)
  return string.format('%.0f', number)
end

local stored_record = redis.call('GET', KEYS[1])
local record = stored_record and cjson.decode(stored_record)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return {'reset'}
end
local state = redis.call('HMGET', catalogue, 'revision', 'compacted', 'lost_version')
local revision = (tonumber(state[1] or '0') or 0) + 1
local compacted = tonumber(state[2] or '0') or 0
-- Highest version of a deleted tombstone: new arms begin above it, so that no version is used twice.
local lost_version = tonumber(state[3] or '0') or 0
-- A key of another type raises here, before the first write.
redis.call('LLEN', log)
redis.call('ZCARD', order)
redis.call('ZCARD', changes)
redis.call('ZCARD', removals)

local there = redis.call('HLEN', arms)
local count = there
local reply = {'ok'}
local plan = {}
for i = HEAD + 1, #ARGV, FIELDS do
  local id, expected, features = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local stored = redis.call('HGET', arms, id)
  local line = redis.call('HGET', versions, id)
  local version = lost_version
  if line then
    version = tonumber(string.match(line, '^(%d+):%d+$'))
  end
  if not version or (stored and not line) then
    return {'corrupt', id}
  end
  local before = stored and version or 0
  if expected ~= '' and tonumber(expected) ~= before then
    return {'version', (i - HEAD - 1) / FIELDS, text(before)}
  end
  local now = before
  if features == '' then
    if stored then
      now = version + 1
      count = count - 1
      plan[#plan + 1] = {id, text(now), false}
    end
  elseif stored ~= features then
    now = version + 1
    count = count + (stored and 0 or 1)
    plan[#plan + 1] = {id, text(now), features}
  end
  reply[#reply + 1] = text(before)
  reply[#reply + 1] = text(now)
end
if count > there and count > tonumber(ARGV[4]) then
  return {'full', there}
end
if #plan == 0 then
  return reply
end

for _, change in ipairs(plan) do
  local id, version, features = change[1], change[2], change[3]
  redis.call('HSET', versions, id, version .. ':' .. ARGV[3])
  redis.call('ZADD', changes, text(revision), id)
  if features then
    redis.call('HSET', arms, id, features)
    redis.call('ZADD', order, 0, id)
    redis.call('ZREM', removals, id)
  else
    redis.call('HDEL', arms, id)
    redis.call('ZREM', order, id)
    redis.call('ZADD', removals, text(revision), id)
  end
end
local excess = redis.call('ZCARD', removals) - tonumber(ARGV[5])
if excess > 0 then
  local oldest = redis.call('ZRANGE', removals, 0, excess - 1, 'WITHSCORES')
  for i = 1, #oldest, 2 do
    local version = string.match(redis.call('HGET', versions, oldest[i]) or '', '^(%d+):')
    lost_version = math.max(lost_version, tonumber(version or '0'))
    compacted = math.max(compacted, tonumber(oldest[i + 1]))
    redis.call('HDEL', versions, oldest[i])
    redis.call('ZREM', changes, oldest[i])
  end
  redis.call('ZREMRANGEBYRANK', removals, 0, excess - 1)
end
redis.call(
  'HSET', catalogue, 'revision', text(revision), 'stamp', ARGV[2],
  'compacted', text(compacted), 'lost_version', text(lost_version)
)
redis.call('LPUSH', log, ARGV[2])
redis.call('LTRIM', log, 0, ARGV[6] - 1)
return reply
