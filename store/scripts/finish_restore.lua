-- Publish the final epoch of a restore and delete its intent.
-- KEYS  namespace, lease, epoch, epoch_log, restoring
-- ARGV  store id, lease token, generation, number, blob, log cap, stamp, members as JSON
-- Reply 'ok' | 'reset' | 'lease' | 'overtaken': the failed check; nothing was written
local stored_record = redis.call('GET', KEYS[1])
local record = stored_record and cjson.decode(stored_record)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
local number = tonumber(redis.call('HGET', KEYS[3], 'number') or '-1') or -1
if redis.call('HGET', KEYS[5], 'generation') ~= ARGV[3] or number >= tonumber(ARGV[4]) then
  return 'overtaken'
end
redis.call('XLEN', KEYS[4])
-- It was not derived from an epoch of this store.
redis.call('HSET', KEYS[3], 'number', ARGV[4], 'blob', ARGV[5], 'members', ARGV[8], 'stamp', ARGV[7],
  'follows', '')
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', 'n', ARGV[4])
redis.call('DEL', KEYS[5])
return 'ok'
