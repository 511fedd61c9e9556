-- Add events to a partition's stream, each event id once, unless their user is in another incarnation.
-- KEYS  marker, events, counters, versions, then one `seen` key for each event
-- ARGV  backlog limit, dedupe window in ms, 1 to write even when all are duplicates, fields and values per event,
--       then for each event: user id, incarnation, its fields and values
-- Reply {'reset'} | {'full', backlog} | {'ok', status, entry id, status, entry id, ...}: 1 accepted, 0 duplicate,
--       2 void (its entry id is empty)
local marker, events, counters, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local limit, window_ms, always_write, width = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local HEAD_KEYS, HEAD_ARGS, OWN_ARGS = 4, 4, 2
local DUPLICATE, ACCEPTED, VOID = 0, 1, 2

if redis.call('EXISTS', marker) == 0 then
  return {'reset'}
end

local function first_argument(i)
  return HEAD_ARGS + (i - HEAD_KEYS - 1) * (OWN_ARGS + width) + 1
end

-- Duplicates take no room: a batch that is sent again gets its answer even when the backlog is full.
-- They are told from void events, too: what was accepted once stays so.
local entry_of, counted, void, fresh = {}, {}, {}, 0
for i = HEAD_KEYS + 1, #KEYS do
  local key, at = KEYS[i], first_argument(i)
  local known = redis.call('GET', key)
  if known then
    entry_of[key] = known
  else
    local incarnation = string.match(redis.call('HGET', versions, ARGV[at]) or '0:0', '^%d+')
    -- Also one of a later incarnation: the store has lost that the user began anew.
    if tonumber(ARGV[at + 1]) ~= tonumber(incarnation or '0') then
      void[i] = true
    elseif not counted[key] then
      counted[key] = true
      fresh = fresh + 1
    end
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
  for i = HEAD_KEYS + 1, #KEYS do
    if entry_of[KEYS[i]] then
      redis.call('PEXPIRE', KEYS[i], window_ms)
      break
    end
  end
end
local reply = {'ok'}
for i = HEAD_KEYS + 1, #KEYS do
  local key = KEYS[i]
  local entry, status = entry_of[key], DUPLICATE
  if void[i] and not entry then
    entry, status = '', VOID
  elseif not entry then
    local first = first_argument(i) + OWN_ARGS
    entry = redis.call('XADD', events, '*', unpack(ARGV, first, first + width - 1))
    redis.call('SET', key, entry, 'PX', window_ms)
    entry_of[key] = entry
    status = ACCEPTED
  end
  reply[#reply + 1] = status
  reply[#reply + 1] = entry
end
return reply
