-- Holder: who has this node's vote. Only reads. Starts with shared.lua.
--
-- Returns false if nobody has, else {value, ms left (-1: no end), a name for the grant}.
local held = redis.call('GET', LOCK)
if not held then
  return false
end
return {held, redis.call('PTTL', LOCK), grant(held)}
