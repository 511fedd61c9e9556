-- Acquire, renew or release a lease; the last two only for its holder.
-- KEYS  lease, and optionally `restoring`
-- ARGV  'acquire' | 'renew' | 'release', token, ttl in ms, 'restore' for a restore
-- Reply 1 | 0. With `restoring`, only a restore acquires the lease while a restore is unfinished
local holder = redis.call('GET', KEYS[1])
local verb, token, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
if holder ~= token then
  local open = not KEYS[2] or ARGV[4] == 'restore' or redis.call('EXISTS', KEYS[2]) == 0
  if verb == 'acquire' and not holder and open then
    redis.call('SET', KEYS[1], token, 'PX', ttl_ms)
    return 1
  end
  return 0
end
if verb == 'release' then
  redis.call('DEL', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
end
return 1
