-- What became of the arms of the catalogue, in the order of their latest changes, from a revision on.
-- KEYS  namespace, catalogue, catalogue_log, arms, arm_changes
-- ARGV  store epoch, revision of the anchor, its stamp, revision to go on after, most arms, enough bytes
-- The anchor is what the reader had when it began; a reader that had nothing says revision 0 once, and takes as its
-- anchor what it is told. Most arms: more than a single revision can have.
-- Reply {'ok', revision, stamp, revision to go on after, 1 if there is more, then for each arm its id and its
--       features, '' for one that was removed} | {'anew'}: the anchor is not in the history, or removals since are not
--       | {'reset'}
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
-- A revision is told whole or not at all, since the next call goes on after it.
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
