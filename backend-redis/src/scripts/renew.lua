-- Renew: the lock lasts another ttl from now, if this very grant still holds it.
--
-- KEYS  1 the lock
-- ARGV  1 'leasehold:1 <claim> <token> ', the beginning of the lock's value  2 ttl ms
--
-- Returns 1 if it does, else 0.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
