-- Holder: what the lock says and how long it lasts. Only reads.
--
-- KEYS  1 the lock
--
-- Returns false if it is free, else {value, ms left (-1: no end), SHA-1 of the value}. The value does
-- not change while a grant lasts, so its digest names the grant, a foreign program's too.
local held = redis.call('GET', KEYS[1])
if not held then
  return false
end
return {held, redis.call('PTTL', KEYS[1]), redis.sha1hex(held)}
