-- Delete a decision, if it is still the one that was read.
-- KEYS  decision
-- ARGV  SHA-1 of its record, in hex
-- Reply 1 | 0: 0 when it is gone or another one
local stored = redis.call('GET', KEYS[1])
if not stored or redis.sha1hex(stored) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
