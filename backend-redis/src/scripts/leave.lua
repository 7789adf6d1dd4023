-- Leave: the claim does not wait any more. The lock is left as it is: this names the queue alone, and so
-- works while its slot migrates. Stands behind find.lua.
--
-- KEYS  1 the queue
-- ARGV  1 the claim  2 its ticket, or '?'
--
-- Returns 1 if the claim had a place, else 0.
local entry = find(KEYS[1], ARGV[1], ARGV[2])
if entry then
  return redis.call('ZREM', KEYS[1], entry)
end
return 0
