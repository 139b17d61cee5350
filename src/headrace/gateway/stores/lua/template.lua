-- A version of a template, or the last one. ARGV: '', name, version or ''.
--   headrace:template:<name>   hash: last, and by version: time and content
local key, version = 'headrace:template:' .. ARGV[2], ARGV[3]
if version == '' then version = redis.call('HGET', key, 'last') end
local found = version and redis.call('HGET', key, version)
return found and {version, found}
