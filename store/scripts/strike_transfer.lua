-- Delete the transfer jobs that name users, in any state, and their results.
-- KEYS  transfer_jobs, transfer_results
-- ARGV  user ids
-- Reply number of jobs deleted
local wanted, struck = {}, {}
for _, user_id in ipairs(ARGV) do
  wanted[user_id] = true
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local sound, job = pcall(cjson.decode, all[i + 1])
  -- A damaged job may name any user.
  local named = not sound or type(job) ~= 'table' or type(job.users) ~= 'table'
  if not named then
    for user_id in pairs(job.users) do
      named = named or wanted[user_id]
    end
  end
  if named then
    struck[#struck + 1] = all[i]
  end
end
redis.call('HLEN', KEYS[2])

for _, id in ipairs(struck) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
return #struck
