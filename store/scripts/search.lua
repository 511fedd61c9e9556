-- Find a user in a part of a stream, in entries of earlier incarnations; the server looks, so that inputs stay there.
-- KEYS  stream
-- ARGV  user id, incarnation, first entry id, last entry id, most entries looked at
-- Reply {id of the last entry looked at ('': there was none), entries looked at, id found, id found, ...}
local user_id, incarnation = ARGV[1], tonumber(ARGV[2])
local rows = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local reply = {#rows > 0 and rows[#rows][1] or '', #rows}
for _, row in ipairs(rows) do
  local theirs, of = false, 0
  for at = 1, #row[2], 2 do
    if row[2][at] == 'u' then
      theirs = row[2][at + 1] == user_id
    elseif row[2][at] == 'i' then
      of = tonumber(row[2][at + 1]) or 0
    end
  end
  if theirs and of < incarnation then
    reply[#reply + 1] = row[1]
  end
end
return reply
