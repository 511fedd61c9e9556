-- Publish the next epoch of a namespace.
-- KEYS  namespace, lease, epoch, epoch_log, restoring
-- ARGV  store id, lease token, number, blob, log cap, stamp, stamp of the epoch it was derived from,
--       members as JSON
-- Reply 'ok' | 'reset' | 'restoring' | 'lease' | 'number' | 'stamp': the failed check; nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
-- Some users are those of a snapshot, so the epoch was derived from a mixture.
if redis.call('EXISTS', KEYS[5]) == 1 then
  return 'restoring'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
local number = tonumber(redis.call('HGET', KEYS[3], 'number') or '-1')
if number ~= tonumber(ARGV[3]) - 1 then
  return 'number'
end
-- A store that lost its latest epoch assigns its number again.
if (redis.call('HGET', KEYS[3], 'stamp') or '') ~= ARGV[7] then
  return 'stamp'
end
redis.call('XLEN', KEYS[4])
redis.call('HSET', KEYS[3], 'number', ARGV[3], 'blob', ARGV[4], 'members', ARGV[8], 'stamp', ARGV[6],
  'follows', ARGV[7])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*', 'n', ARGV[3])
return 'ok'
