-- Delete keys of a namespace that was deleted, unless another one has begun under its name since.
-- KEYS  namespace or marker, whichever lies in the slot of the keys, then the keys
-- ARGV  store epoch of the deleted namespace, 'namespace' | 'marker': which it is
-- Reply 1 | 0 when they are another's: nothing was deleted then
local guard = redis.call('GET', KEYS[1])
if ARGV[2] == 'marker' then
  if guard and guard ~= ARGV[1] then
    return 0
  end
else
  local record = guard and cjson.decode(guard)
  if not record or record.store_epoch ~= ARGV[1] or record.state ~= 'deleted' then
    return 0
  end
end
for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return 1
