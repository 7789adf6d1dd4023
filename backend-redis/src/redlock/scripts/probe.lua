-- Probe: runs every command that the other scripts use, on keys of its own that end by themselves, so
-- that a missing right shows when connecting and not when somebody waits.
--
-- KEYS  1, 2 keys that nobody uses  3 the state of this node
-- ARGV  1 a channel of the prefix
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
try('PUBSUB', 'NUMSUB', ARGV[1])
try('SET', KEYS[1], 'probe', 'PX', 1000)
try('GET', KEYS[1])
try('PTTL', KEYS[1])
try('PEXPIRE', KEYS[1], 1000)
try('DEL', KEYS[1])
try('HSET', KEYS[2], 'probe', '1')
try('PEXPIRE', KEYS[2], 1000)
try('HGET', KEYS[2], 'probe')
try('HMGET', KEYS[3], 'token', 'run')
try('HDEL', KEYS[2], 'probe')
try('PUBLISH', ARGV[1], 'probe')
return failed
