-- Write the status of the fusion training; only for the holder of its lease.
-- KEYS  namespace, fusion_lease, fusion_job
-- ARGV  store id, lease token, then name and value of each field
-- Reply 'ok' | 'reset' | 'lease': the failed check; nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
redis.call('HSET', KEYS[3], unpack(ARGV, 3))
return 'ok'
