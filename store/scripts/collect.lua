-- Read users and the lines of the update log after a cursor at one moment.
-- KEYS  marker, counters, update_log, then `user`, `samples`, `start` for each user
-- ARGV  store id, cursor, most lines
-- Reply {'store-id'} | {'ok', applied, lines, then for each user: {incarnation, version, epoch, state}, samples,
--       {incarnation, start}}
local marker, counters, update_log = KEYS[1], KEYS[2], KEYS[3]
local HEAD_KEYS = 3

if redis.call('GET', marker) ~= ARGV[1] then
  return {'store-id'}
end
local lines = redis.call('XRANGE', update_log, '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
local reply = {'ok', redis.call('HGET', counters, 'applied') or '0', lines}
for i = HEAD_KEYS + 1, #KEYS, 3 do
  reply[#reply + 1] = redis.call('HMGET', KEYS[i], 'incarnation', 'version', 'epoch', 'state')
  reply[#reply + 1] = redis.call('LRANGE', KEYS[i + 1], 0, -1)
  reply[#reply + 1] = redis.call('HMGET', KEYS[i + 2], 'incarnation', 'start')
end
return reply
