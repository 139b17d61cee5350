-- Reserve for all scopes or for none.
-- ARGV: time or '', request, tokens, 1e-9 dollars, second or 0 (now), seconds of the lease, scopes as JSON:
-- name, and of their limits those that there are: running, requests, tokens, day, cost with period day or month.
local now = time(ARGV[1])
local request, tokens, nano_usd = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local second = tonumber(ARGV[5])
if second == 0 then second = math.floor(now) end
local scopes = cjson.decode(ARGV[7])
local hold = 'headrace:hold:' .. request

-- When so much of the minute has slid away.
local function free_at(parts, excess)
  table.sort(parts, function(one, other) return one[1] < other[1] end)
  for _, part in ipairs(parts) do
    excess = excess - part[2]
    if excess <= 0 then return part[1] + MINUTE end
  end
  return now + MINUTE
end

local function refused(index, measure, used, at)
  return {'refused', index - 1, measure, whole(used), exact(now), exact(at or 0)}
end

for _, ended in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', exact(now))) do
  let_go(ended, now, 0, 0)
end
local held, new = {'held', whole(second)}, {}
for index, scope in ipairs(scopes) do
  local sums, parts = minute_of(scope.name, now)
  if redis.call('HEXISTS', hold, '@' .. scope.name) == 1 then  -- asked again: the answer was lost
    sums.r, sums.t = sums.r - 1, sums.t - tokens
  else
    if scope.running then
      local running = redis.call('SCARD', 'headrace:running:' .. scope.name)
      if running >= scope.running then return refused(index, 'running', running) end
    end
    if scope.requests and sums.r + 1 > scope.requests then
      return refused(index, 'requests', sums.r, free_at(parts.r, sums.r + 1 - scope.requests))
    end
    if scope.tokens and sums.t + tokens > scope.tokens then
      return refused(index, 'tokens', sums.t, free_at(parts.t, sums.t + tokens - scope.tokens))
    end
    local day = 'headrace:day:' .. whole(day_of(now)) .. ':' .. scope.name
    if scope.day then
      local used = spent(day, 'tokens')
      if used + tokens > scope.day then return refused(index, 'day', used) end
    end
    if scope.cost then
      local month = 'headrace:month:' .. whole(month_of(now)) .. ':' .. scope.name
      local used = spent(scope.period == 'day' and day or month, 'nano_usd')
      if used + nano_usd > scope.cost then return refused(index, 'cost', used) end
    end
    table.insert(new, scope.name)
  end
  table.insert(held, whole(sums.r))
  table.insert(held, whole(sums.t))
end
for _, scope in ipairs(new) do
  redis.call('HSET', hold, '@' .. scope, 1)
  redis.call('SADD', 'headrace:running:' .. scope, request)
  add_use(scope, second, now, 1, tokens, nano_usd)
end
redis.call('HSET', hold, 'tokens', ARGV[3], 'nano_usd', ARGV[4], 'second', whole(second))
redis.call('ZADD', LEASES, exact(now + tonumber(ARGV[6])), request)
return held
