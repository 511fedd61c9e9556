-- Put a dead letter back into its partition's stream as a new event.
-- KEYS  marker, events, dead_letters, counters, the event's `seen` key
-- ARGV  letter id, backlog limit, dedupe window in ms
-- Reply {'reset'} | {'full', backlog} | {'gone'} | {'stored-again', entry id} | {'ok', entry id}
local marker, events, dead_letters, counters, seen = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local letter_id, limit, window_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]

if redis.call('EXISTS', marker) == 0 then
  return {'reset'}
end
local letter = redis.call('XRANGE', dead_letters, letter_id, letter_id)[1]
if not letter then
  return {'gone'}
end
local fields, buried_entry = {}, nil
for at = 1, #letter[2], 2 do
  local name, value = letter[2][at], letter[2][at + 1]
  if name == 'dead_entry' then
    buried_entry = buried_entry or value
  elseif string.sub(name, 1, 5) ~= 'dead_' then
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
end
-- The same event id was accepted again after the dedupe window: only one may count.
local known = redis.call('GET', seen)
if known and known ~= buried_entry then
  return {'stored-again', known}
end
local backlog = redis.call('XLEN', events)
if backlog + 1 > limit then
  return {'full', backlog}
end

-- First write: fails, with nothing written, if `counters` is not a hash of numbers or memory is full.
redis.call('HINCRBY', counters, 'replayed', 1)
local entry = redis.call('XADD', events, '*', unpack(fields))
redis.call('XDEL', dead_letters, letter_id)
redis.call('SET', seen, entry, 'PX', window_ms)
return {'ok', entry}
