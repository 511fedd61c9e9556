-- Request a fusion training, unless one is queued or running.
-- KEYS  namespace, fusion_job
-- ARGV  store id, then name and value of each field of the job
-- Reply 'reset' | 'ok' | 'standing' if a job is queued or running: nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
local state = redis.call('HGET', KEYS[2], 'state')
if state == 'queued' or state == 'running' then
  return 'standing'
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 'ok'
