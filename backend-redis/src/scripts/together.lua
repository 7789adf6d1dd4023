
end

-- Acquires, releases and renewals that met at their client, each as if it were alone: one that fails leaves
-- the others as they are. The scripts of the three stand in front of this as functions.
--
-- The client sorts them: first those that are simple as far as it knows, by kind (claims without a place
-- in a queue, releases of what never waited, renewals), each of a lock of its own; behind them the
-- others, in the order in which they came. Two on one lock are among the others, whatever they are.
--
-- KEYS  1 the server's token counter
--       then the queue of each simple acquire and release
--       then the lock of each simple acquire, release and renewal
--       then for each of the others: the lock, its queue
-- ARGV  1 floor: no token at or below it may be granted any more
--       2, 3, 4 how many simple acquires, releases, renewals there are
--       then for each simple acquire 2 to 5 of acquire.lua, for each such release 2 of release.lua, for
--       each renewal 1 and 2 of renew.lua
--       then for each of the others five: its name, and what its script takes behind the floor
--       what is absent is ''
--
-- Returns for each, in this order, what its script returns, or a string: what went wrong.
--
-- When the server's memory is full, it refuses writes up to the first that goes through in a script, here
-- perhaps the DEL of a lock that is freed. New locks that travel behind that one are then granted.
local call, try = redis.call, redis.pcall
local TOKEN, FLOOR = KEYS[1], tonumber(ARGV[1])
local acquires, releases, renewals = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local queued = acquires + releases
local simple = queued + renewals
-- Where the keys of the first begin, and its arguments.
local QUEUES, LOCKS, OTHERS = 1, 1 + queued, 1 + queued + simple
local MINE, FREED, RENEWED = 4, 4 + 4 * acquires, 4 + 4 * acquires + releases
local answers = {}

-- 1. Most locks are free, or their holder's, and nobody waits for any of them. One look shows it, and
--    commands that take many keys serve all at once: that is what makes travelling together cheap. What
--    this does not decide is left to step 2.
if queued > 0 and call('EXISTS', unpack(KEYS, QUEUES + 1, LOCKS + acquires)) == 0 then
  local last = acquires > 0 and try('INCRBY', TOKEN, acquires)
  if type(last) == 'number' and last - acquires >= FLOOR then
    for i = 1, acquires do
      local at, token = MINE + 4 * i - 3, last - acquires + i
      local value = ARGV[at] .. string.format('%.0f', token) .. ARGV[at + 2]
      local set = try('SET', KEYS[LOCKS + i], value, 'PX', ARGV[at + 1])
      answers[i] = set.err or token
    end
  end
  if releases > 0 then
    local from, to = LOCKS + acquires + 1, LOCKS + queued
    local values, freed = call('MGET', unpack(KEYS, from, to)), {}
    for i = 1, releases do
      local value = values[i]
      if value and string.find(value, ARGV[FREED + i], 1, true) == 1 then
        freed[#freed + 1] = KEYS[from + i - 1]
        answers[acquires + i] = 1
      else
        answers[acquires + i] = 0
      end
    end
    if #freed > 0 then
      call('DEL', unpack(freed))
    end
  end
end

-- 2. All others, each by its own script.
local function present(argument)
  return argument ~= '' and argument or nil
end

local function run(script, keys, arguments)
  local done, answer = pcall(script, keys, arguments)
  if not done then
    answer = type(answer) == 'table' and answer.err or tostring(answer)
  end
  return answer
end

for i = 1, queued do
  if not answers[i] then
    local keys = {KEYS[LOCKS + i], KEYS[QUEUES + i], TOKEN}
    if i <= acquires then
      local at = MINE + 4 * i - 3
      local place = present(ARGV[at + 3])
      answers[i] = run(acquire, keys, {ARGV[1], ARGV[at], ARGV[at + 1], ARGV[at + 2], place})
    else
      answers[i] = run(release, keys, {ARGV[1], ARGV[FREED + i - acquires]})
    end
  end
end
for i = 1, renewals do
  local at = RENEWED + 2 * i - 1
  answers[queued + i] = run(renew, {KEYS[LOCKS + queued + i]}, {ARGV[at], ARGV[at + 1]})
end
local at = RENEWED + 2 * renewals + 1
for i = OTHERS + 1, #KEYS, 2 do
  local keys = {KEYS[i], KEYS[i + 1], TOKEN}
  local name, a, b, c, d = unpack(ARGV, at, at + 4)
  if name == 'acquire' then
    answers[#answers + 1] = run(acquire, keys, {ARGV[1], a, b, c, present(d)})
  elseif name == 'release' then
    answers[#answers + 1] = run(release, keys, {ARGV[1], a, present(b)})
  else
    answers[#answers + 1] = run(renew, keys, {a, b})
  end
  at = at + 5
end
return answers
