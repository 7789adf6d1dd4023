-- Seed and mark: what this node knows, or since when it has been waiting to, if it stands as it was
-- seen.
--
-- KEYS  1 the state of this node
-- ARGV  1 run of this server  2 what was stored  3 the token, or '' to mark
--
-- Returns 1 if it was written, else 0.
local state = redis.call('HMGET', KEYS[1], 'token', 'run', 'marked')
if (state[1] or '-') .. ' ' .. (state[2] or '-') .. ' ' .. (state[3] or '-') ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'token', 'marked')
if ARGV[3] == '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'marked', string.format('%.0f', time[1] * 1000000 + time[2]))
else
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'token', ARGV[3])
end
return 1
