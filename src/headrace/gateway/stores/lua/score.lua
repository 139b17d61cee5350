-- Keep a score for the last request of an id, if it ended within a week. ARGV: time or '', tenant, request, score.
--   headrace:feedback   hash: the row's id to time and score
local now = time(ARGV[1])
for day = 0, 7 do
  local requests = 'headrace:requests:' .. whole(day_of(now) - day * DAY)
  local id = redis.call('HGET', requests, ARGV[2] .. ' ' .. ARGV[3])
  if id then
    if redis.call('HSETNX', 'headrace:feedback', id, exact(now) .. ' ' .. ARGV[4]) == 0 then return 'scored' end
    local row = redis.call('XRANGE', 'headrace:ledger', id, id)[1][2]
    return {row[2], row[4]}
  end
end
return false
