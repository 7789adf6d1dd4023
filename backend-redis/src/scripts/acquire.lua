-- Acquire: try, take a place in the queue, or ask again from it. May be sent any number of times for
-- one claim. Starts with hand_over.lua.
--
-- ARGV  2 claim  3 ttl ms  4 '<inbox> <owner> <label>'  5 since ms, on this server's clock
--       6 'try' to take no place; else the ticket, '' before there is one, '?' if it may have been lost
--
-- Returns {1, token}               granted, for a whole ttl from now
--         {0, ticket, ms}          waiting; the holder's lock ends in so many ms (-1: never by itself)
--         {0, 0, ms}               somebody else holds it, no place was taken
local claim, ttl, rest, ticket = ARGV[2], ARGV[3], ARGV[4], ARGV[6]

local function take()
  local token = next_token()
  redis.call('SET', LOCK,
    'leasehold:1 ' .. claim .. ' ' .. digits(token) .. ' ' .. ttl .. ' ' .. ARGV[5] .. ' ' .. rest,
    'PX', ttl)
  return {1, token}
end

-- Dead waiters behind a long hold would stay until it ends. So each newcomer to a long queue looks at
-- four of its places, the next newcomer at the next four.
local function sweep(number, now)
  local length = redis.call('ZCARD', QUEUE)
  if length >= 32 then
    local from = number % length * 4 % length
    for _, entry in ipairs(redis.call('ZRANGE', QUEUE, from, from + 3)) do
      local other, deadline, _, to = fields(entry)
      if other and not lives(deadline, to, now) then
        redis.call('ZREM', QUEUE, entry)
      end
    end
  end
end

-- 1. Free, and nobody waits.
if redis.call('EXISTS', LOCK, QUEUE) == 0 then
  return take()
end

-- 2. Ours already: the answer or the message that told us so was lost. Asking again renews it.
local held = redis.call('GET', LOCK)
local mine = 'leasehold:1 ' .. claim .. ' '
if held and string.sub(held, 1, #mine) == mine then
  redis.call('PEXPIRE', LOCK, ttl)
  return {1, tonumber(string.match(held, '^%d+', #mine + 1))}
end

-- 3. A try takes no place. A lock that is free but queued for belongs to the first living waiter.
if ticket == 'try' then
  if not held and not hand_over() then
    return take()
  end
  return {0, 0, redis.call('PTTL', LOCK)}
end

-- 4. Take or keep the place. The entry's deadline is what shows that this waiter lives; one that lost
--    its entry (it was silent too long, the data is gone) comes back with its old ticket.
local known = tonumber(ticket)
if ticket ~= '' then
  local old = find(claim, ticket)
  if old then
    known = known or tonumber(redis.call('ZSCORE', QUEUE, old))
    redis.call('ZREM', QUEUE, old)
  end
end
known = known or next_token()
local now = math.floor(clock() / 1000)
redis.call('ZADD', QUEUE, digits(known),
  '1 ' .. claim .. ' ' .. digits(now + ttl) .. ' ' .. ttl .. ' ' .. rest)
if ticket == '' then
  sweep(known, now)
end
local keep = math.max(600000, 2 * ttl)
if redis.call('PTTL', QUEUE) < keep then
  redis.call('PEXPIRE', QUEUE, digits(keep))
end

-- 5. Free but queued for: the first living waiter gets it, at the latest this one.
if not held then
  local winner, token = hand_over(claim)
  if winner == claim then
    return {1, token}
  end
end
return {0, known, redis.call('PTTL', LOCK)}
