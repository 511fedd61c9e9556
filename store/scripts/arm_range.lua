-- Arms of the catalogue in the order of their ids.
-- KEYS  arms, arm_versions, arm_order
-- ARGV  first and last id as ZRANGE BYLEX takes them, most arms, bytes after which to stop
-- Reply {1 if there are more, 0 otherwise, then for each arm its id, its version and time, its features}
local ids = redis.call('ZRANGE', KEYS[3], ARGV[1], ARGV[2], 'BYLEX', 'LIMIT', 0, ARGV[3] + 1)
local reply = {0}
local size = 0
for place, id in ipairs(ids) do
  if place > tonumber(ARGV[3]) or size >= tonumber(ARGV[4]) then
    reply[1] = 1
    break
  end
  local features = redis.call('HGET', KEYS[1], id) or ''
  reply[#reply + 1] = id
  reply[#reply + 1] = redis.call('HGET', KEYS[2], id) or ''
  reply[#reply + 1] = features
  size = size + #features
end
return reply
