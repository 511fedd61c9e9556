-- Say how the training of fusion is coming along; only its lease's holder may.
-- KEYS  namespace, fusion_lease, fusion_job
-- ARGV  store epoch, lease token, then name and value of each field
-- Reply 'ok' | 'reset' | 'lease': what did not hold; nothing was written then
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
