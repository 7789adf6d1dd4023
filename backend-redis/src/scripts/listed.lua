-- Listed: what there is of some locks. Only reads.
--
-- KEYS  1, 3, 5 … locks  2, 4, 6 … the queue of each
--
-- Returns for each lock {value, ms left (-1: no end), SHA-1 of the value, how many wait}. The value is
-- false if it is free, and 0 if it is data of another type; how many wait is -1 if the queue is.
local found = {}
for i = 1, #KEYS, 2 do
  local held, waiting = redis.pcall('GET', KEYS[i]), redis.pcall('ZCARD', KEYS[i + 1])
  local left, grant = redis.call('PTTL', KEYS[i]), ''
  if type(held) == 'table' then
    held = 0
  elseif held then
    grant = redis.sha1hex(held)
  end
  if type(waiting) == 'table' then
    waiting = -1
  end
  table.insert(found, {held, left, grant, waiting})
end
return found
