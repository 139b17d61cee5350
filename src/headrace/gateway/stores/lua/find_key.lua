-- The key with a secret. ARGV: '', the secret's hash in hexadecimal.
local id = redis.call('HGET', 'headrace:secrets', ARGV[2])
return id and redis.call('HGET', 'headrace:keys', id)
