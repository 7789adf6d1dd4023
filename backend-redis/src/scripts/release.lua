-- Release and cancel: the claim neither holds the lock nor waits for it any more. Stands behind
-- release_free.lua, hand_over.lua and find.lua.
--
-- ARGV  2 'leasehold:1 <claim> ', the lock's value in front of the token
--       3 the claim's ticket, '?' if it may wait under one that it does not know, absent if it does not
--         wait
--
-- Returns 1 if the claim held the lock, else 0.
local mine, ticket = ARGV[2], ARGV[3]

-- 1. It leaves the queue.
if ticket then
  local entry = find(QUEUE, string.match(mine, '%S+ (%S+)'), ticket)
  if entry then
    call('ZREM', QUEUE, entry)
  end
end

-- 2. If it holds the lock, the next one gets it.
local held = call('GET', LOCK)
if not held or string.sub(held, 1, #mine) ~= mine then
  return 0
end
if not hand_over() then
  call('DEL', LOCK)
end
return 1
