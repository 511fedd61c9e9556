-- Remove users from the sources of the fusion model, and notify services, which hold the profiles.
-- KEYS  fusion, fusion_sources, epoch, epoch_log
-- ARGV  log cap, new stamp, then user ids
-- Reply number of them that were sources
local fusion, fusion_sources = KEYS[1], KEYS[2]
local wanted, struck, tokens = {}, {}, {}
for i = 3, #ARGV do
  wanted[ARGV[i]] = true
end
local names = redis.call('HGETALL', fusion_sources)
for i = 1, #names, 2 do
  if wanted[names[i + 1]] then
    struck[names[i]] = true
    tokens[#tokens + 1] = names[i]
  end
end
if #tokens == 0 then
  return 0
end
local stored = redis.call('HGET', fusion, 'sources')
local sources, kept = stored and cjson.decode(stored) or {}, {}
for _, source in ipairs(sources) do
  if not struck[source[1]] then
    kept[#kept + 1] = source
  end
end
local number = redis.call('HGET', KEYS[3], 'number') or '0'
redis.call('XLEN', KEYS[4])

if #kept < #sources then
  -- cjson encodes an empty table as an object.
  redis.call('HSET', fusion, 'sources', #kept > 0 and cjson.encode(kept) or '[]', 'stamp', ARGV[2])
  redis.call('HINCRBY', fusion, 'struck', #sources - #kept)
end
for _, token in ipairs(tokens) do
  redis.call('HDEL', fusion_sources, token)
end
if #kept < #sources then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[1], '*', 'n', number)
end
return #tokens
