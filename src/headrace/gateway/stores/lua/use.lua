-- What is used and reserved of a scope. ARGV: time or '', scope.
local now, scope = time(ARGV[1]), ARGV[2]
local sums = minute_of(scope, now)
local day = 'headrace:day:' .. whole(day_of(now)) .. ':' .. scope
return {
  redis.call('SCARD', 'headrace:running:' .. scope), whole(sums.r), whole(sums.t), whole(spent(day, 'tokens')),
  whole(spent(day, 'nano_usd')),
  whole(spent('headrace:month:' .. whole(month_of(now)) .. ':' .. scope, 'nano_usd')),
}
