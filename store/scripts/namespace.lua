-- Replace the record of a namespace if it has the expected revision.
-- KEYS  namespace
-- ARGV  store id, expected revision, new record
-- Reply {1} | {0, stored record} | {0} if there is none
local stored = redis.call('GET', KEYS[1])
if not stored then
  return {0}
end
local record = cjson.decode(stored)
if record.store_epoch ~= ARGV[1] or record.revision ~= tonumber(ARGV[2]) then
  return {0, stored}
end
redis.call('SET', KEYS[1], ARGV[3])
return {1}
