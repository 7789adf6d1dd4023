-- Acquire: asks for this node's vote. Starts with shared.lua.
--
-- ARGV  1 claim  2 number of the attempt  3 proposed token  4 ttl ms  5 run of this server
--       6 '<owner> <label>'
--
-- Returns {'granted', token known before}
--         {'held', token known, whose vote it is, ms left (-1: no end)}
--         {'unseeded'}   no data, or that of another run: it does not vote
--         {'gone'}       this attempt was taken back, or a younger one has the vote
--         {'ahead'}      the proposal is more than a day ahead of this node's clock
local claim, number, proposal = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local state = redis.call('HMGET', STATE, 'token', 'run')
local known = tonumber(state[1] or nil)
if not known or state[2] ~= ARGV[5] then
  return {'unseeded'}
end
local now = clock()
if proposal > now + 86400000000 then
  return {'ahead'}
end
if tonumber(redis.call('GET', TOMB) or 0) >= number then
  return {'gone'}
end

local held = redis.call('GET', LOCK)
local theirs, its = attempt(held)
if held and theirs ~= claim then
  return {'held', known, grant(held), redis.call('PTTL', LOCK)}
end
if held and tonumber(its) > number then
  return {'gone'}
end
if held and tonumber(its) == number then
  return {'granted', known}
end
redis.call('SET', LOCK,
  FORMAT .. claim .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' '
    .. digits(math.floor(now / 1000)) .. ' ' .. ARGV[6],
  'PX', ARGV[4])
if proposal > known then
  redis.call('HSET', STATE, 'token', ARGV[3])
end
return {'granted', known}
