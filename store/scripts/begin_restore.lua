-- Write the intent of a restore: until it is finished no other epoch is published.
-- KEYS  namespace, lease, epoch, restoring, restores
-- ARGV  store id, lease token, snapshot id, least number of the final epoch
-- Reply {'ok', generation, number of the final epoch} | {'reset'} | {'lease'}: nothing was written
local stored_record = redis.call('GET', KEYS[1])
local record = stored_record and cjson.decode(stored_record)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return {'reset'}
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return {'lease'}
end
local following = (tonumber(redis.call('HGET', KEYS[3], 'number') or '-1') or -1) + 1
-- Users may have the number of the epoch that an unfinished restore was going to publish.
-- A damaged record of a restore has no target and is replaced.
local unfinished = tonumber(redis.pcall('HGET', KEYS[4], 'target') or '0') or 0
local target = string.format('%.0f', math.max(following, unfinished, tonumber(ARGV[4])))

local generation = string.format('%.0f', redis.call('INCR', KEYS[5]))
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[4], 'generation', generation, 'token', ARGV[2], 'snapshot', ARGV[3], 'target', target)
return {'ok', generation, target}
