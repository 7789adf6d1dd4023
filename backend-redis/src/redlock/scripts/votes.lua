-- Votes: who has this node's vote for each of many locks. Only reads. Starts with shared.lua.
--
-- KEYS  the locks
--
-- Returns for each of them false if nobody has, 0 if it is data of another type, else as holder.lua.
local votes = {}
for _, lock in ipairs(KEYS) do
  local held = redis.pcall('GET', lock)
  if type(held) == 'table' then
    held = 0
  elseif held then
    held = {held, redis.call('PTTL', lock), grant(held)}
  end
  table.insert(votes, held)
end
return votes
