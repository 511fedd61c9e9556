-- Write down what an admin did, unless the namespace is gone.
-- KEYS  namespace, audit
-- ARGV  store epoch, least number of lines kept, then fields and values
-- Reply the id of the line, or nothing when it was not written
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return false
end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, 3))
