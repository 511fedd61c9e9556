-- Publish the next version of a namespace's fusion model.
-- KEYS  namespace, fusion_lease, fusion, fusion_sources, epoch, epoch_log, restoring
-- ARGV  store id, lease token, version, stamp, blob, sources as JSON, report as JSON, created in ms, events,
--       number of sources, log cap, then token and user id of each source
-- Reply 'ok' | 'reset' | 'restoring' | 'lease' | 'version': the failed check; nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return 'reset'
end
if redis.call('EXISTS', KEYS[7]) == 1 then
  return 'restoring'
end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return 'lease'
end
if tonumber(redis.call('HGET', KEYS[3], 'version') or '0') ~= tonumber(ARGV[3]) - 1 then
  return 'version'
end
redis.call('HLEN', KEYS[4])
local number = redis.call('HGET', KEYS[5], 'number') or '0'
redis.call('XLEN', KEYS[6])

-- First write: fails, with nothing written, if memory is full.
redis.call('HSET', KEYS[3], 'version', ARGV[3], 'stamp', ARGV[4], 'blob', ARGV[5], 'sources', ARGV[6],
  'report', ARGV[7], 'created_ms', ARGV[8], 'events', ARGV[9], 'count', ARGV[10], 'struck', '0')
for i = 12, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1])
end
-- Services check for a new version when the epoch log has a new line.
redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[11], '*', 'n', number)
return 'ok'
