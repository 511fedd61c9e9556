-- Add events to a partition's stream, each event id once, unless their user has another incarnation.
-- KEYS  marker, events, counters, versions, then two for each event: `seen` and `rewarded`, or `seen` twice if the
--       rewards of its arm need not be counted
-- ARGV  backlog limit, dedupe window in ms, 1 to write even if all are duplicates, most rewards that are counted for an
--       arm of a decision, fields and values per event, then for each event: user id, incarnation, its fields and values
-- Reply {'reset'} | {'full', backlog} | {'ok', status, entry id, status, entry id, ...}: 1 accepted, 0 duplicate,
--       2 void, 3 too many (both with an empty entry id)
local marker, events, counters, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local limit, window_ms, always_write = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1'
local rewards_max, width = tonumber(ARGV[4]), tonumber(ARGV[5])
local HEAD_KEYS, HEAD_ARGS, OWN_KEYS, OWN_ARGS = 4, 5, 2, 2
local DUPLICATE, ACCEPTED, VOID, TOO_MANY = 0, 1, 2, 3

if redis.call('EXISTS', marker) == 0 then
  return {'reset'}
end

local function first_argument(i)
  return HEAD_ARGS + (i - HEAD_KEYS - 1) / OWN_KEYS * (OWN_ARGS + width) + 1
end

-- Duplicates need no room: a batch that is sent again succeeds even if the backlog is full.
-- An accepted event is a duplicate, not void, even if the incarnation changed since.
local entry_of, counted, refused, rewards, fresh = {}, {}, {}, {}, 0
for i = HEAD_KEYS + 1, #KEYS, OWN_KEYS do
  local key, rewarded, at = KEYS[i], KEYS[i + 1], first_argument(i)
  local known = redis.call('GET', key)
  if known then
    entry_of[key] = known
  else
    local incarnation = string.match(redis.call('HGET', versions, ARGV[at]) or '0:0', '^%d+')
    -- Also if the event's incarnation is higher: the store has lost the new incarnation.
    if tonumber(ARGV[at + 1]) ~= tonumber(incarnation or '0') then
      refused[i] = VOID
    elseif not counted[key] then
      local taken = 0
      if rewarded ~= key then
        taken = rewards[rewarded] or tonumber(redis.call('GET', rewarded) or '0')
      end
      if taken >= rewards_max then
        refused[i] = TOO_MANY
      else
        rewards[rewarded] = taken + 1
        counted[key] = true
        fresh = fresh + 1
      end
    end
  end
end
local backlog = redis.call('XLEN', events)
if fresh > 0 and backlog + fresh > limit then
  return {'full', backlog}
end

-- First write: fails, with nothing written, if `counters` is not a hash or memory is full.
if fresh > 0 then
  redis.call('HINCRBY', counters, 'enqueued', fresh)
elseif always_write then
  -- WAIT waits only for writes of its own connection: this one comes after the write of the first event.
  for i = HEAD_KEYS + 1, #KEYS, OWN_KEYS do
    if entry_of[KEYS[i]] then
      redis.call('PEXPIRE', KEYS[i], window_ms)
      break
    end
  end
end
local reply = {'ok'}
for i = HEAD_KEYS + 1, #KEYS, OWN_KEYS do
  local key, rewarded = KEYS[i], KEYS[i + 1]
  local entry, status = entry_of[key], DUPLICATE
  if refused[i] and not entry then
    entry, status = '', refused[i]
  elseif not entry then
    local first = first_argument(i) + OWN_ARGS
    entry = redis.call('XADD', events, '*', unpack(ARGV, first, first + width - 1))
    redis.call('SET', key, entry, 'PX', window_ms)
    if rewarded ~= key then
      redis.call('SET', rewarded, rewards[rewarded], 'PX', window_ms)
    end
    entry_of[key] = entry
    status = ACCEPTED
  end
  reply[#reply + 1] = status
  reply[#reply + 1] = entry
end
return reply
