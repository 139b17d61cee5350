-- Leases that last from now. ARGV: time or '', seconds of the lease, requests as JSON.
local ends_at = exact(time(ARGV[1]) + tonumber(ARGV[2]))
for _, request in ipairs(cjson.decode(ARGV[3])) do redis.call('ZADD', LEASES, 'XX', ends_at, request) end
