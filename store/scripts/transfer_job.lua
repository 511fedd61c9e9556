-- Write the status of a transfer job that exists; only for the holder of the lease.
-- KEYS  namespace, transfer_lease, transfer_jobs, transfer_results
-- ARGV  store id, lease token, id of the job, the job as JSON, its time to live in ms, its result as JSON or ''
-- Reply 'ok' | 'reset' | 'lease' | 'gone': the failed check; nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
-- A job is deleted when a user it names is forgotten; it must not be written again.
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then
  return 'gone'
end
redis.call('HLEN', KEYS[4])

-- First write: fails, with nothing written, if memory is full. The result is written before the job is done.
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[6])
end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
return 'ok'
