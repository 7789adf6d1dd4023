-- Raise: this node knows the token from now on, if this very attempt has its vote. Starts with
-- shared.lua.
--
-- ARGV  1 'leasehold-redlock:1 <claim> <number> '  2 token
--
-- Returns 1 if it does, else 0.
local held = redis.call('GET', LOCK)
if not held or string.sub(held, 1, #ARGV[1]) ~= ARGV[1] then
  return 0
end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', STATE, 'token') or 0) then
  redis.call('HSET', STATE, 'token', ARGV[2])
end
redis.call('SET', LOCK, ARGV[1] .. ARGV[2] .. string.match(held, '^%d+(.*)$', #ARGV[1] + 1), 'KEEPTTL')
return 1
