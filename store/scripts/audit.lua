-- Add a line to the audit log, unless the namespace is gone.
-- KEYS  namespace, audit
-- ARGV  store id, least number of lines kept, then fields and values
-- Reply id of the line; false if nothing was written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return false
end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, 3))
