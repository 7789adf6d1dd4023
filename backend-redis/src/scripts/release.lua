-- Release and cancel: the claim neither holds the lock nor waits for it any more. Starts with
-- hand_over.lua.
--
-- ARGV  2 claim  3 its ticket, '?' if it may wait under one that it does not know, '' if it does not wait
--
-- Returns 1 if the claim held the lock, else 0.
local claim, ticket = ARGV[2], ARGV[3]

if ticket ~= '' then
  local entry = find(claim, ticket)
  if entry then
    redis.call('ZREM', QUEUE, entry)
  end
end

local held = redis.call('GET', LOCK)
local mine = 'leasehold:1 ' .. claim .. ' '
if not held or string.sub(held, 1, #mine) ~= mine then
  return 0
end
if not hand_over() then
  redis.call('DEL', LOCK)
end
return 1
