-- What was used takes the place of what was reserved, and rows join the ledger: once, however often it is asked.
-- ARGV: time or '', gateway, reservation, second, tokens, 1e-9 dollars, scopes as JSON; rows as JSON, each with the
-- seconds since it ended; tenant and request as feedback names them; as JSON, the reservations of which the gateway
-- knows that they are settled.
--   headrace:settled:<gateway>   set of reservations, until the gateway knows that they are settled
--   headrace:ledger              stream: at, row
--   headrace:requests:<day>      hash: <tenant> <request> to the row's id
local now = time(ARGV[1])
local settled, reservation = 'headrace:settled:' .. ARGV[2], ARGV[3]
for _, known in ipairs(cjson.decode(ARGV[11])) do redis.call('SREM', settled, known) end
if redis.call('SISMEMBER', settled, reservation) == 1 then return 0 end
local second, tokens, nano_usd = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local hold = let_go(reservation, now, tokens, nano_usd)
for _, scope in ipairs(cjson.decode(ARGV[7])) do
  if not hold['@' .. scope] then  -- the lease's end has given back what was reserved
    add_use(scope, second, now, 0, tokens, nano_usd)
  end
end
local id
for _, row in ipairs(cjson.decode(ARGV[8])) do
  id = redis.call('XADD', 'headrace:ledger', '*', 'at', exact(now - row[1]), 'row', row[2])
end
local requests = 'headrace:requests:' .. whole(day_of(now))
redis.call('HSET', requests, ARGV[9] .. ' ' .. ARGV[10], id)
redis.call('EXPIRE', requests, 8 * DAY)
redis.call('SADD', settled, reservation)
redis.call('EXPIRE', settled, 7 * DAY)
return 1
