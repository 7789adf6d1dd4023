-- Probe: runs every command that the other scripts use, on keys of its own that end by themselves, so
-- that a missing right shows when connecting and not when somebody waits. Stands behind
-- hand_over.lua.
--
-- KEYS  1, 2 keys that nobody uses  3 the token counter
-- ARGV  2 this client's inbox
--
-- Returns a flat list of commands that failed, each followed by what the server said.
local failed = {}

local function try(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    table.insert(failed, (select(1, ...)))
    table.insert(failed, answer.err)
  end
end

try('TIME')
try('PUBSUB', 'NUMSUB', inbox(ARGV[2]))
try('SET', LOCK, '0', 'PX', 1000)
try('INCR', LOCK)
try('INCRBY', LOCK, 1)
try('GET', LOCK)
try('MGET', LOCK, QUEUE)
try('EXISTS', LOCK, QUEUE)
try('PTTL', LOCK)
try('PEXPIRE', LOCK, 1000)
try('DEL', LOCK)
try('ZADD', QUEUE, 1, 'probe')
try('PEXPIRE', QUEUE, 1000)
try('ZSCORE', QUEUE, 'probe')
try('ZCARD', QUEUE)
try('ZRANGEBYSCORE', QUEUE, 1, 1)
try('ZREVRANGE', QUEUE, 0, 0)
try('ZRANGE', QUEUE, 0, 0)
try('ZREM', QUEUE, 'other')
try('ZPOPMIN', QUEUE)
try('PUBLISH', inbox(ARGV[2]), 'probe')
return failed
