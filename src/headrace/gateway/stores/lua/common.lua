-- What all scripts begin with. Keys are named here and in redis.py only:
--   headrace:hold:<request>      hash: tokens, nano_usd, second, and a field @<scope> for each scope
--   headrace:leases              sorted set: request by the end of its lease
--   headrace:running:<scope>     set of requests
--   headrace:minute:<scope>      hash: r<second> requests, t<second> tokens
--   headrace:day:<start>:<scope>, headrace:month:<start>:<scope>   hash: tokens, nano_usd
local MINUTE, DAY = 60, 86400
local LEASES = 'headrace:leases'

-- Seconds since 1970, by this server's clock unless a test gives its own.
local function time(given)
  if given ~= '' then return tonumber(given) end
  local now = redis.call('TIME')
  return tonumber(now[1]) + tonumber(now[2]) / 1e6
end

-- A number as Redis reads it: Lua would write large ones with an exponent.
local function whole(number) return string.format('%.0f', number) end
local function exact(seconds) return string.format('%.6f', seconds) end

local function day_of(second) return math.floor(second / DAY) * DAY end

-- The first second of UTC's month, by the day of the month as in Howard Hinnant's civil_from_days.
local function month_of(second)
  local days = math.floor(second / DAY)
  local of_era = (days + 719468) % 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  local day = of_year - math.floor((153 * month + 2) / 5)
  return (days - day) * DAY
end

local function hash_of(key)
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function add(key, field, amount, keep_s)
  if amount ~= 0 then
    redis.call('HINCRBY', key, field, whole(amount))
    redis.call('EXPIRE', key, keep_s)
  end
end

-- Count what is used or reserved; less than 0 gives back. `second`: when it was reserved.
local function add_use(scope, second, now, requests, tokens, nano_usd)
  if second > math.floor(now) - MINUTE then
    local minute = 'headrace:minute:' .. scope
    add(minute, 'r' .. whole(second), requests, 2 * MINUTE)
    add(minute, 't' .. whole(second), tokens, 2 * MINUTE)
  end
  local day = 'headrace:day:' .. whole(day_of(second)) .. ':' .. scope
  add(day, 'tokens', tokens, 3 * DAY)
  add(day, 'nano_usd', nano_usd, 3 * DAY)
  add('headrace:month:' .. whole(month_of(second)) .. ':' .. scope, 'nano_usd', nano_usd, 70 * DAY)
end

-- End a reservation; `used` tokens and money take the place of what it held of each scope.
local function let_go(request, now, used_tokens, used_nano_usd)
  local key = 'headrace:hold:' .. request
  local hold = hash_of(key)
  for field in pairs(hold) do
    if string.sub(field, 1, 1) == '@' then
      local scope = string.sub(field, 2)
      redis.call('SREM', 'headrace:running:' .. scope, request)
      add_use(scope, tonumber(hold.second), now, 0,
        used_tokens - tonumber(hold.tokens), used_nano_usd - tonumber(hold.nano_usd))
    end
  end
  redis.call('DEL', key)
  redis.call('ZREM', LEASES, request)
  return hold
end

-- What is used and reserved of the last minute: requests and tokens, each a sum and its parts by the second.
local function minute_of(scope, now)
  local key, since, old = 'headrace:minute:' .. scope, math.floor(now) - MINUTE, {}
  local sums, parts = {r = 0, t = 0}, {r = {}, t = {}}
  for field, amount in pairs(hash_of(key)) do
    local kind, second = string.sub(field, 1, 1), tonumber(string.sub(field, 2))
    if second > since then
      sums[kind] = sums[kind] + tonumber(amount)
      table.insert(parts[kind], {second, tonumber(amount)})
    else
      table.insert(old, field)
    end
  end
  if #old > 0 then redis.call('HDEL', key, unpack(old)) end
  return sums, parts
end

local function spent(key, field) return tonumber(redis.call('HGET', key, field) or 0) end
