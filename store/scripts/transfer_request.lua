-- Ask for a transfer job, unless the same is asked for or under way already; old ones make room.
-- KEYS  namespace, transfer_jobs, transfer_results
-- ARGV  store epoch, time in ms, how long a job is remembered in ms, jobs remembered, jobs that may wait, id of the new
--       job, what it asks for, the job as JSON
-- Reply {'reset'} | {'standing', job as JSON} | {'full', jobs that wait} | {'ok'}; written is only with the last
local jobs, results, now_ms = KEYS[2], KEYS[3], tonumber(ARGV[2])
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return {'reset'}
end
local waiting, ended, gone = 0, {}, {}
local all = redis.call('HGETALL', jobs)
for i = 1, #all, 2 do
  local sound, job = pcall(cjson.decode, all[i + 1])
  if not sound or type(job) ~= 'table' or type(job.requested_ms) ~= 'number' then
    gone[#gone + 1] = all[i]
  elseif job.requested_ms + tonumber(ARGV[3]) <= now_ms then
    gone[#gone + 1] = all[i]
  elseif job.state == 'queued' or job.state == 'running' then
    if job.asked == ARGV[7] then
      return {'standing', all[i + 1]}
    end
    waiting = waiting + 1
  else
    ended[#ended + 1] = {job.requested_ms, all[i]}
  end
end
if waiting >= tonumber(ARGV[5]) then
  return {'full', waiting}
end
table.sort(ended, function(one, other)
  return one[1] > other[1] or (one[1] == other[1] and one[2] > other[2])
end)
for place = math.max(1, tonumber(ARGV[4]) - waiting), #ended do
  gone[#gone + 1] = ended[place][2]
end
redis.call('HLEN', results)

-- First write: it fails, with nothing written, when memory is full.
redis.call('HSET', jobs, ARGV[6], ARGV[8])
for _, id in ipairs(gone) do
  redis.call('HDEL', jobs, id)
  redis.call('HDEL', results, id)
end
redis.call('PEXPIRE', jobs, ARGV[3])
redis.call('PEXPIRE', results, ARGV[3])
return {'ok'}
