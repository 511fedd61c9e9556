-- Delete keys of a deleted namespace, unless a new one of its name exists.
-- KEYS  namespace or marker, whichever is in the slot of the keys, then the keys
-- ARGV  store id of the deleted namespace, 'namespace' | 'marker': the kind of the first key
-- Reply 1 | 0 if the keys are of another namespace: nothing was deleted
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
