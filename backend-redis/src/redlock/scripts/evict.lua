-- Evict: takes the vote back from whoever has it, or only from the grant that is named. Starts with
-- shared.lua.
--
-- ARGV  1 the grant, or ''  2 the channel to tell
--
-- Returns 1 if it was taken, else 0.
local held = redis.call('GET', LOCK)
if not held or ARGV[1] ~= '' and ARGV[1] ~= grant(held) then
  return 0
end
free(ARGV[2])
return 1
