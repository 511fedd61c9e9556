-- Say how a transfer job is coming along; only the lease's holder may, and of a job that is still wanted.
-- KEYS  namespace, transfer_lease, transfer_jobs, transfer_results
-- ARGV  store epoch, lease token, id of the job, the job as JSON, how long it is remembered in ms, its result as JSON or
--       ''
-- Reply 'ok' | 'reset' | 'lease' | 'gone': what did not hold; nothing was written then
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
-- Somebody whom it names may have been forgotten: nothing brings the name back.
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then
  return 'gone'
end
redis.call('HLEN', KEYS[4])

-- First write: it fails, with nothing written, when memory is full. A job is only done once its result is there.
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[6])
end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
return 'ok'
