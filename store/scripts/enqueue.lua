-- Add events to a partition's stream, each event id once.
-- KEYS  marker, events, counters, then one `seen` key for each event
-- ARGV  backlog limit, dedupe window in ms, 1 to write even when all are duplicates, arguments per event, then the
--       fields and values of each event
-- Reply {'reset'} | {'full', backlog} | {'ok', 1 | 0, entry id, 1 | 0, entry id, ...}: 1 accepted, 0 duplicate
local marker, events, counters = KEYS[1], KEYS[2], KEYS[3]
local limit, window_ms, always_write, width = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local HEAD_KEYS, HEAD_ARGS = 3, 4

if redis.call('EXISTS', marker) == 0 then
  return {'reset'}
end

-- Duplicates take no room: a batch that is sent again gets its answer even when the backlog is full.
local entry_of, counted, fresh = {}, {}, 0
for i = HEAD_KEYS + 1, #KEYS do
  local key = KEYS[i]
  local known = redis.call('GET', key)
  if known then
    entry_of[key] = known
  elseif not counted[key] then
    counted[key] = true
    fresh = fresh + 1
  end
end
local backlog = redis.call('XLEN', events)
if fresh > 0 and backlog + fresh > limit then
  return {'full', backlog}
end

-- First write: it fails, with nothing written, when `counters` is no hash or memory is full.
if fresh > 0 then
  redis.call('HINCRBY', counters, 'enqueued', fresh)
elseif always_write then
  -- WAIT waits for the writes of its own connection alone: this one comes after those of whoever was first.
  redis.call('PEXPIRE', KEYS[HEAD_KEYS + 1], window_ms)
end
local reply = {'ok'}
for i = HEAD_KEYS + 1, #KEYS do
  local key = KEYS[i]
  local entry, accepted = entry_of[key], 0
  if not entry then
    local first = HEAD_ARGS + (i - HEAD_KEYS - 1) * width + 1
    entry = redis.call('XADD', events, '*', unpack(ARGV, first, first + width - 1))
    redis.call('SET', key, entry, 'PX', window_ms)
    entry_of[key] = entry
    accepted = 1
  end
  reply[#reply + 1] = accepted
  reply[#reply + 1] = entry
end
return reply
