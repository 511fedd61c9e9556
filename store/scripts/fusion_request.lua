-- Ask for fusion to be trained, unless that is asked for or under way already.
-- KEYS  namespace, fusion_job
-- ARGV  store epoch, then name and value of each field of the job asked for
-- Reply 'reset' | 'ok' | 'standing', the latter when there is such a job already; nothing was written then
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
