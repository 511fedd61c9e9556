-- Status of one partition at one moment; writes nothing.
-- KEYS  events, counters, dead_letters
-- ARGV  group, names of counters
-- Reply waiting, pending, consumers, age of the oldest event in ms or -1, dead letters, value of each counter or false
local pending, consumers = 0, 0
local group = redis.pcall('XPENDING', KEYS[1], ARGV[1])
if not group.err then
  pending = group[1]
  consumers = #redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
end
local age = -1
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
if #oldest > 0 then
  local now = redis.call('TIME')
  local stored_ms = string.match(oldest[1][1], '^%d+')
  age = math.max(0, now[1] * 1000 + math.floor(now[2] / 1000) - stored_ms)
end
local reply = {
  redis.call('XLEN', KEYS[1]), pending, consumers, age, redis.call('XLEN', KEYS[3]),
}
for place = 2, #ARGV do
  reply[#reply + 1] = redis.call('HGET', KEYS[2], ARGV[place])
end
return reply
