-- Free: takes the vote for this attempt, or an older one of its claim, back. Starts with shared.lua.
--
-- ARGV  1 claim  2 number of the attempt  3 ttl ms  4 the channel to tell, or ''
--
-- Returns 1 if there was one, else 0.
local claim, number = ARGV[1], tonumber(ARGV[2])
local theirs, its = attempt(redis.call('GET', LOCK))
if theirs == claim then
  if tonumber(its) > number then
    return 0
  end
  free(ARGV[4])
  return 1
end
-- It may still be on its way.
if tonumber(redis.call('GET', TOMB) or 0) < number then
  redis.call('SET', TOMB, ARGV[2], 'PX', ARGV[3])
end
return 0
