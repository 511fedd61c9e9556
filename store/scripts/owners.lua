-- Owners of partitions that are registered now; writes nothing.
-- KEYS  workers, owners
-- Reply partition, token, …
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGETALL', KEYS[2])
local found = {}
for at = 1, #held, 2 do
  local expires_ms = redis.call('ZSCORE', KEYS[1], held[at + 1])
  if expires_ms and tonumber(expires_ms) > now_ms then
    found[#found + 1] = held[at]
    found[#found + 1] = held[at + 1]
  end
end
return found
