-- Evict: takes the lock away, tells the holder, and gives it to the first living waiter. Stands
-- behind hand_over.lua.
--
-- ARGV  2 the grant as holder.lua names it, or '' for whoever holds it
--
-- Returns 1 if something was taken away, else 0.
local held = call('GET', LOCK)
if not held or ARGV[2] ~= '' and ARGV[2] ~= redis.sha1hex(held) then
  return 0
end
local claim, token, to = string.match(held, '^leasehold:1 (%S+) (%d+) %d+ %d+ (%S+) ')
if claim then
  call('PUBLISH', inbox(to), 'evict ' .. claim .. ' ' .. token)
end
if not hand_over() then
  call('DEL', LOCK)
end
return 1
