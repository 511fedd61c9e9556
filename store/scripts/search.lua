-- Find entries of earlier incarnations of users in a part of a stream, without sending the inputs of events.
-- KEYS  stream
-- ARGV  first entry id, last entry id, most entries to read, then for each user: user id, incarnation
-- Reply {id of the last entry read ('': none), number of entries read, then the ids found}
local incarnations = {}
for i = 4, #ARGV, 2 do
  incarnations[ARGV[i]] = tonumber(ARGV[i + 1])
end
local rows = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
local reply = {#rows > 0 and rows[#rows][1] or '', #rows}
for _, row in ipairs(rows) do
  local current, of = nil, 0
  for at = 1, #row[2], 2 do
    if row[2][at] == 'u' then
      current = incarnations[row[2][at + 1]]
    elseif row[2][at] == 'i' then
      of = tonumber(row[2][at + 1]) or 0
    end
  end
  if current and of < current then
    reply[#reply + 1] = row[1]
  end
end
return reply
