-- Acquire: try, take a place in the queue, or ask again from it. May be sent any number of times for
-- one claim. Stands behind acquire_free.lua, hand_over.lua and find.lua.
--
-- ARGV  2 'leasehold:1 <claim> ', the lock's value in front of the token
--       3 ttl ms
--       4 ' <ttl ms> <since ms> <inbox> <owner> <label>', the value behind it; since is our reckoning of
--         this server's clock
--       5 'try' to take no place; else the ticket, absent before there is one, '?' if it may be lost
--
-- Returns token              granted, for a whole ttl from now
--         {ticket, ms}       waiting; the holder's lock ends in so many ms (-1: never by itself)
--         {0, ms}            somebody else holds it, no place was taken
local mine, ttl, rest, ticket = ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- 1. Free, and nobody waits.
if free then
  return grant(mine, ttl, rest)
end

-- 2. Ours already: the answer or the message that told us so was lost. Asking again renews it.
local held = call('GET', LOCK)
if held and string.sub(held, 1, #mine) == mine then
  call('PEXPIRE', LOCK, ttl)
  return tonumber(string.match(held, '^%d+', #mine + 1))
end

-- 3. A try takes no place. A lock that is free but queued for belongs to the first living waiter.
if ticket == 'try' then
  if not held and not hand_over() then
    return grant(mine, ttl, rest)
  end
  return {0, call('PTTL', LOCK)}
end

-- 4. Take or keep the place. The entry's deadline is what shows that this waiter lives; one that lost
--    its entry (it was silent too long, the data is gone) comes back with its old ticket.
local claim = string.match(mine, '%S+ (%S+)')
local who = string.match(rest, '^ %d+ %d+ (.*)$')
local known = ticket and tonumber(ticket)
local old = ticket and find(QUEUE, claim, ticket)
if old then
  known = known or tonumber(call('ZSCORE', QUEUE, old))
end
known = known or next_token()
local now = math.floor(clock() / 1000)
local entry = '1 ' .. claim .. ' ' .. digits(now + ttl) .. ' ' .. ttl .. ' ' .. who
local keep = math.max(600000, 2 * ttl)
if old then
  -- This is allowed when memory is full, and what follows it in a script is then allowed too.
  call('PEXPIRE', QUEUE, digits(math.max(keep, call('PTTL', QUEUE))))
end
call('ZADD', QUEUE, digits(known), entry)
if old and old ~= entry then
  -- Behind ZADD: a node whose slot migrates does not let an emptied queue be filled again.
  call('ZREM', QUEUE, old)
elseif call('PTTL', QUEUE) < keep * 0.9 then
  call('PEXPIRE', QUEUE, digits(keep))
end

-- 5. Dead waiters behind a long hold would stay until it ends. So every eighth newcomer to a long queue
--    looks at 32 of its places, the next such at the next 32.
local length = not ticket and known % 8 == 0 and call('ZCARD', QUEUE) or 0
if length >= 32 then
  local from = known % length * 4 % length
  for _, entry in ipairs(call('ZRANGE', QUEUE, from, from + 31)) do
    local other, deadline, _, _, to = fields(entry)
    if other and not lives(deadline, to, now) then
      call('ZREM', QUEUE, entry)
    end
  end
end

-- 6. Free but queued for: the first living waiter gets it, at the latest this one.
if not held then
  local winner, token = hand_over(claim)
  if winner == claim then
    return token
  end
end
return {known, call('PTTL', LOCK)}
