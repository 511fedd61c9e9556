-- Register a worker and lease it an equal share of the partitions; by the clock of the server.
-- A lease counts as long as its worker is registered. A partition that is still in use is kept until it is not.
-- KEYS  workers, owners
-- ARGV  token, time to live of the registration in ms (0: unregister and release all), number of partitions,
--       partitions in use, separated by spaces
-- Reply tokens of all registered workers, sorted; partitions leased to this worker as its share
local workers, owners, token, ttl_ms = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now_ms)
if ttl_ms > 0 then
  redis.call('ZADD', workers, now_ms + ttl_ms, token)
else
  redis.call('ZREM', workers, token)
end
local present = redis.call('ZRANGE', workers, 0, -1)
table.sort(present)
local place = {}
for index, each in ipairs(present) do
  place[each] = index
end
local in_use = {}
for partition in string.gmatch(ARGV[4], '%d+') do
  in_use[partition] = true
end
local held = redis.call('HGETALL', owners)
local owner_of = {}
for at = 1, #held, 2 do
  owner_of[held[at]] = held[at + 1]
end
local share = {}
for number = 0, tonumber(ARGV[3]) - 1 do
  local partition = tostring(number)
  local owner = owner_of[partition]
  if place[token] and number % #present == place[token] - 1 then
    if owner ~= token and not place[owner or ''] then
      redis.call('HSET', owners, partition, token)
      owner = token
    end
    if owner == token then
      share[#share + 1] = number
    end
  elseif owner == token and not (place[token] and in_use[partition]) then
    redis.call('HDEL', owners, partition)
  end
end
return { present, share }
