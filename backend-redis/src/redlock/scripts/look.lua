-- Look: how it stands with this node's data. Only reads.
--
-- KEYS  1 the state of this node
-- ARGV  1 run of this server
--
-- Returns {token or '', µs since it was marked or -1, what is stored}
local state = redis.call('HMGET', KEYS[1], 'token', 'run', 'marked')
local stored = (state[1] or '-') .. ' ' .. (state[2] or '-') .. ' ' .. (state[3] or '-')
if state[2] ~= ARGV[1] then
  return {'', -1, stored}
end
local waiting = -1
if state[3] then
  local time = redis.call('TIME')
  waiting = math.max(0, time[1] * 1000000 + time[2] - state[3])
end
return {state[1] or '', waiting, stored}
