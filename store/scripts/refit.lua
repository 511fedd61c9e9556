-- Begin a refit under an epoch that is not published yet; of two trainers the later one wins.
-- KEYS  lease, refits
-- ARGV  lease token
-- Reply number of the refit; 0 if the lease is lost
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('INCR', KEYS[2])
