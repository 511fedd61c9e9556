-- Request a transfer job, unless the same one is queued or running; the oldest jobs are deleted.
-- KEYS  namespace, transfer_jobs, transfer_results
-- ARGV  store id, time in ms, time to live of a job in ms, most jobs kept, most jobs waiting, id of the new job, its
--       question, the job as JSON without its number
-- Reply {'reset'} | {'standing', job as JSON} | {'full', jobs waiting} | {'ok', number}: written only with the last
local jobs, results, now_ms = KEYS[2], KEYS[3], tonumber(ARGV[2])
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored)
if not record or record.store_epoch ~= ARGV[1] or record.state == 'deleted' then
  return {'reset'}
end
local waiting, ended, gone, last = 0, {}, {}, 0
local all = redis.call('HGETALL', jobs)
for i = 1, #all, 2 do
  local sound, job = pcall(cjson.decode, all[i + 1])
  -- Jobs of an older version have no number.
  local number = sound and type(job) == 'table' and type(job.number) == 'number' and job.number or 0
  last = math.max(last, number)
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
    ended[#ended + 1] = {number, job.requested_ms, all[i]}
  end
end
if waiting >= tonumber(ARGV[5]) then
  return {'full', waiting}
end
table.sort(ended, function(one, other)
  for place = 1, 3 do
    if one[place] ~= other[place] then
      return one[place] > other[place]
    end
  end
  return false
end)
for place = math.max(1, tonumber(ARGV[4]) - waiting), #ended do
  gone[#gone + 1] = ended[place][3]
end
redis.call('HLEN', results)

-- First write: fails, with nothing written, if memory is full.
-- The number is added to the text: decoding and encoding it here would change other fields.
local added = string.sub(ARGV[8], 1, -2) .. string.format(', "number": %d}', last + 1)
redis.call('HSET', jobs, ARGV[6], added)
for _, id in ipairs(gone) do
  redis.call('HDEL', jobs, id)
  redis.call('HDEL', results, id)
end
redis.call('PEXPIRE', jobs, ARGV[3])
redis.call('PEXPIRE', results, ARGV[3])
return {'ok', last + 1}
