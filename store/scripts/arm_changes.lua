-- Changes of the catalogue after a revision, in the order of the arms' latest changes.
-- KEYS  namespace, catalogue, catalogue_log, arms, arm_changes
-- ARGV  store id, revision of the anchor, its stamp, revision after which to read, most arms, bytes after which to stop
-- The anchor is the revision that the reader had at first. A new reader passes 0 once, then the revision of the reply.
-- `most arms` must exceed the arms of one revision.
-- Reply {'ok', revision, stamp, revision after which to continue, 1 if there is more, then id and features of each arm,
--       '' if removed} | {'anew'}: the anchor, or removals since, are no longer known | {'reset'}
local HEAD = 5
local catalogue, log, arms, changes = KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local stored_record = redis.call('GET', KEYS[1])
local record = stored_record and cjson.decode(stored_record)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return {'reset'}
end
local state = redis.call('HMGET', catalogue, 'revision', 'stamp', 'compacted')
local revision = tonumber(state[1] or '0') or 0
local anchor = tonumber(ARGV[2])
if anchor > 0 then
  local age = revision - anchor
  if age < 0 or anchor < (tonumber(state[3] or '0') or 0) or redis.call('LINDEX', log, age) ~= ARGV[3] then
    return {'anew'}
  end
end
local rows = redis.call('ZRANGE', changes, '(' .. ARGV[4], '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[5], 'WITHSCORES')
-- A revision is returned completely or not at all, since the next call continues after it.
local cut = #rows == 2 * tonumber(ARGV[5]) and rows[#rows] or nil
local reply = {'ok', tostring(state[1] or '0'), state[2] or '', ARGV[4], 0}
local size = 0
for i = 1, #rows, 2 do
  local after = rows[i + 1]
  if after == cut or (size >= tonumber(ARGV[6]) and after ~= reply[4]) then
    reply[HEAD] = 1
    break
  end
  local features = redis.call('HGET', arms, rows[i]) or ''
  reply[#reply + 1] = rows[i]
  reply[#reply + 1] = features
  reply[4] = after
  size = size + #features
end
return reply
