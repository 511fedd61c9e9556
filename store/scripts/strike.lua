-- Remove users from the members of the current epoch; its number and stamp do not change.
-- KEYS  epoch
-- ARGV  user ids
-- Reply number of them that were members
local stored = redis.call('HGET', KEYS[1], 'members')
if not stored then
  return 0
end
local struck, kept = {}, {}
for _, user_id in ipairs(ARGV) do
  struck[user_id] = true
end
local members = cjson.decode(stored)
for _, user_id in ipairs(members) do
  if not struck[user_id] then
    kept[#kept + 1] = user_id
  end
end
if #kept < #members then
  -- cjson encodes an empty table as an object.
  redis.call('HSET', KEYS[1], 'members', #kept > 0 and cjson.encode(kept) or '[]')
end
return #members - #kept
