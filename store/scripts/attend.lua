-- Say that a worker is there, and learn who else is; the server's clock counts, since those of machines differ.
-- KEYS  workers
-- ARGV  token, how long the word is good for in ms (0: it leaves)
-- Reply the tokens of all workers that are there
local workers, token, ttl_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now_ms)
if ttl_ms > 0 then
  redis.call('ZADD', workers, now_ms + ttl_ms, token)
else
  redis.call('ZREM', workers, token)
end
return redis.call('ZRANGE', workers, 0, -1)
