-- Release, the short way: nobody waits. Otherwise hand_over.lua and release.lua follow.
if redis.call('EXISTS', KEYS[2]) == 0 then
  local held = redis.call('GET', KEYS[1])
  if held and string.sub(held, 1, #ARGV[2]) == ARGV[2] then
    return redis.call('DEL', KEYS[1])
  end
  return 0
end

