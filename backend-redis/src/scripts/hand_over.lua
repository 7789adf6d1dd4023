-- Shared by all scripts that grant a lock or hand it over: names, forms, tokens.
--
-- KEYS  1 the lock  2 its queue  3 the token counter, one for each server, in a cluster for each slot
-- ARGV  1 floor: no token at or below it may be granted any more
--
-- The lock       leasehold:1 <claim> <token> <ttl ms> <since ms> <inbox> <owner> <label>
-- A queue entry  1 <claim> <deadline ms> <ttl ms> <inbox> <owner> <label>, its score is the ticket
-- An inbox       channel <prefix>leasehold:inbox:<inbox>
-- Its messages   grant <claim> <token> <the lock's key>
--                evict <claim> <token>
--                next <claim> <ms>         it is the next one now, and the lock ends in so many ms
--
-- Numbers are doubles in Lua, exact below 2^53: tokens count microseconds and reach that in 2255.
local LOCK, QUEUE, TOKEN = KEYS[1], KEYS[2], KEYS[3]
local call = redis.call

local function digits(number)
  return string.format('%.0f', number)
end

-- Microseconds of the server's clock.
local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The next token or ticket. A counter at or below the asking client's floor is new, or has lost its
-- data: it starts again from the clock, since tokens never got ahead of that.
local function next_token()
  local token = call('INCR', TOKEN)
  local floor = tonumber(ARGV[1])
  if token <= floor then
    token = math.max(floor, clock()) + 1
    call('SET', TOKEN, digits(token))
  end
  return token
end

-- Gives the lock to a claim and returns its token. `mine` is the value in front of the token, `rest`
-- what is behind it.
local function grant(mine, ttl, rest)
  local token = next_token()
  call('SET', LOCK, mine .. digits(token) .. rest, 'PX', ttl)
  return token
end

local function inbox(id)
  return string.match(TOKEN, '^.*leasehold:') .. 'inbox:' .. id
end

-- The fields of a queue entry: claim, deadline, ttl, who it is, and of that its inbox. Of a form that this
-- version does not know: nothing.
local function fields(entry)
  return string.match(entry, '^1 (%S+) (%d+) (%d+) ((%S+) .*)$')
end

-- Whether a waiter lives: it has renewed its entry within its ttl, and its inbox is open on this node.
--
-- The inbox is asked for first, not by publishing to it: PUBLISH crosses to other nodes and replicas
-- even where it returns 0. The deadline is needed as well: the inbox of a stopped process stays open,
-- and an operator may subscribe to everything.
local function lives(deadline, to, now)
  return tonumber(deadline) >= now and call('PUBSUB', 'NUMSUB', inbox(to))[2] > 0
end

-- Whoever is next would ask again after a third of its own ttl, which may be long after the lock of a
-- holder with a shorter one has ended.
--
-- pcall: the queue may be gone by now, and then it is no longer there for a node whose slot migrates.
local function tell_next(ttl)
  local entry = redis.pcall('ZRANGE', QUEUE, 0, 0)[1]
  -- Cheaply first: a claim has 36 letters.
  local own = entry and tonumber(string.match(entry, '^%d+ (%d+)', 40))
  if own and ttl * 3 < own then
    local claim, _, _, _, to = fields(entry)
    if claim then
      call('PUBLISH', inbox(to), 'next ' .. claim .. ' ' .. ttl)
    end
  end
end

-- Gives the lock to the first waiter that lives, `me`, the caller itself, included; says which claim
-- got which token, or nil.
--
-- Nothing is rolled back if the script fails, so ZPOPMIN comes first: it is allowed when memory is
-- full, and what follows it in a script is then allowed too. PUBLISH comes last: who is told, holds.
local function hand_over(me)
  local now
  while true do
    local entry = call('ZPOPMIN', QUEUE)[1]
    if not entry then
      return nil
    end
    now = now or math.floor(clock() / 1000)
    local claim, deadline, ttl, who, to = fields(entry)
    if claim and (claim == me or lives(deadline, to, now)) then
      local token = grant('leasehold:1 ' .. claim .. ' ', ttl, ' ' .. ttl .. ' ' .. digits(now) .. ' ' .. who)
      if claim ~= me then
        call('PUBLISH', inbox(to), 'grant ' .. claim .. ' ' .. digits(token) .. ' ' .. LOCK)
      end
      tell_next(tonumber(ttl))
      return claim, token
    end
  end
end
