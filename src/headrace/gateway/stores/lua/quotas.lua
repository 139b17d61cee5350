-- All that is counted, as of one moment: each key with its hash; of a reservation also the end of its lease.
local found = {}
for _, kind in ipairs({'minute', 'day', 'month', 'hold'}) do
  for _, key in ipairs(redis.call('KEYS', 'headrace:' .. kind .. ':*')) do
    local row = redis.call('HGETALL', key)
    table.insert(row, 1, key)
    if kind == 'hold' then
      table.insert(row, 'ends_at')
      table.insert(row, redis.call('ZSCORE', LEASES, string.sub(key, #'headrace:hold:' + 1)) or 0)
    end
    table.insert(found, row)
  end
end
return found
