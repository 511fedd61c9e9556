-- Strike users out of the members of the current epoch; to services that serve it, it stays the same one.
-- KEYS  epoch
-- ARGV  user ids
-- Reply how many of them were members
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
  -- An empty table would be written as an object.
  redis.call('HSET', KEYS[1], 'members', #kept > 0 and cjson.encode(kept) or '[]')
end
return #members - #kept
