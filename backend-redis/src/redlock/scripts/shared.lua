-- Shared: put in front of the scripts of Redlock.
--
-- KEYS  1 the lock  2 the state of this node  3 the tombstone of a claim
--
-- The lock       leasehold-redlock:1 <claim> <number> <token> <ttl ms> <since ms> <owner> <label>
-- The state      a hash: token (the highest known), run (of the server that may go by it),
--                marked (µs; since when it has been waiting to vote)
-- A tombstone    the number of the youngest attempt that was taken back
-- Messages       freed <token> <clients that wait> <the lock's key>
--
-- Numbers are doubles in Lua, exact below 2^53: tokens count microseconds and reach that in 2255.
local LOCK, STATE, TOMB = KEYS[1], KEYS[2], KEYS[3]
local FORMAT = 'leasehold-redlock:1 '

local function digits(number)
  return string.format('%.0f', number)
end

-- Microseconds of the server's clock.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Claim and number of the attempt that has the vote; nil if it is somebody else's value.
local function attempt(held)
  return string.match(held or '', '^leasehold%-redlock:1 (%S+) (%d+) ')
end

-- A name for whoever has the vote.
local function grant(held)
  local claim, number = attempt(held)
  return claim and claim .. ' ' .. number or redis.sha1hex(held)
end

-- The lock is free on this node.
local function free(channel)
  redis.call('DEL', LOCK)
  if channel ~= '' then
    local waiting = redis.call('PUBSUB', 'NUMSUB', channel)[2]
    if waiting > 0 then
      local token = redis.call('HGET', STATE, 'token') or '0'
      redis.call('PUBLISH', channel, 'freed ' .. token .. ' ' .. waiting .. ' ' .. LOCK)
    end
  end
end

