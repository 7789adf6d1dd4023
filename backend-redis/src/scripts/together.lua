
end

-- Acquires, renewals and releases that met at their client, each as if it were alone: one that fails
-- leaves the others as they are. The scripts of the three stand in front of this as functions.
--
-- KEYS  1 the server's token counter
--       then for each call: the lock, its queue
-- ARGV  1 floor: no token at or below it may be granted any more
--       then for each call five: its name, and what its script takes from there on, '' where that is
--       absent
--
-- Returns for each call what its script returns, or a string: what went wrong.
--
-- When the server's memory is full, it refuses writes up to the first that goes through in a script, here
-- perhaps the DEL of a lock that is freed. New locks that travel with that one are then granted.
local TOKEN, FLOOR = KEYS[1], tonumber(ARGV[1])
local call, try = redis.call, redis.pcall
local calls = (#KEYS - 1) / 2
local answers = {}

-- 1. Most calls are about a lock for which nobody waits, and of which no other call here speaks. Commands
--    that take many keys serve all of these at once: that is what makes travelling together cheap. What
--    this does not decide is left to step 2.
local seen, queues, locks, simple = {}, {}, {}, {}
for i = 1, calls do
  local lock = KEYS[2 * i]
  seen[lock] = (seen[lock] or 0) + 1
end
for i = 1, calls do
  local lock = KEYS[2 * i]
  if seen[lock] == 1 then
    simple[#simple + 1] = i
    locks[#locks + 1] = lock
    queues[#queues + 1] = KEYS[2 * i + 1]
  end
end
if #simple > 0 and call('EXISTS', unpack(queues)) == 0 then
  local values = call('MGET', unpack(locks))
  local free, freed = {}, {}
  for n, i in ipairs(simple) do
    local at, value = 5 * i - 3, values[n]
    local name, mine = ARGV[at], ARGV[at + 1]
    if value then
      if string.sub(value, 1, #mine) == mine then
        if name == 'release' then
          freed[#freed + 1] = locks[n]
          answers[i] = 1
        elseif name == 'renew' then
          local renewed = try('PEXPIRE', locks[n], ARGV[at + 2])
          answers[i] = type(renewed) == 'table' and renewed.err or renewed
        end
      elseif name ~= 'acquire' then
        answers[i] = 0
      end
    elseif name == 'acquire' then
      free[#free + 1] = i
    else
      answers[i] = 0
    end
  end
  if #freed > 0 then
    call('DEL', unpack(freed))
  end
  if #free > 0 then
    local last = try('INCRBY', TOKEN, #free)
    if type(last) == 'number' and last - #free >= FLOOR then
      for n, i in ipairs(free) do
        local at, token = 5 * i - 3, last - #free + n
        local value = ARGV[at + 1] .. string.format('%.0f', token) .. ARGV[at + 3]
        -- NX, since other data than a string looks free up to here.
        local set = try('SET', KEYS[2 * i], value, 'NX', 'PX', ARGV[at + 2])
        if set then
          answers[i] = set.err or token
        end
      end
    end
  end
end

-- 2. All others in their order, each by its own script.
local function present(argument)
  return argument ~= '' and argument or nil
end
for i = 1, calls do
  if not answers[i] then
    local at, keys = 5 * i - 3, {KEYS[2 * i], KEYS[2 * i + 1], TOKEN}
    local name, a, b, c, d = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
    local done, answer
    if name == 'acquire' then
      done, answer = pcall(acquire, keys, {ARGV[1], a, b, c, present(d)})
    elseif name == 'release' then
      done, answer = pcall(release, keys, {ARGV[1], a, present(b)})
    else
      done, answer = pcall(renew, keys, {a, b})
    end
    if not done then
      answer = type(answer) == 'table' and answer.err or tostring(answer)
    end
    answers[i] = answer
  end
end
return answers
