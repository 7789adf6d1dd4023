-- Acquire, the short way: most locks are free and nobody waits, and then this is all. Whatever it cannot
-- decide is left to what follows, hand_over.lua and acquire.lua, where all is told; making their
-- functions costs as much as this.
local call = redis.call
local free = call('EXISTS', KEYS[1], KEYS[2]) == 0
if free then
  local token = call('INCR', KEYS[3])
  if token > tonumber(ARGV[1]) then
    call('SET', KEYS[1], ARGV[2] .. string.format('%.0f', token) .. ARGV[4], 'PX', ARGV[3])
    return token
  end
end

