-- Shared by the scripts that look for a claim in a queue.

-- The queue's entry of a claim, or nil. `ticket` is its score, or '?' if the claim does not know it:
-- an answer was lost. Then it is looked for from the newest on.
local function find(queue, claim, ticket)
  local mine = '1 ' .. claim .. ' '
  local page, from = {}, 0
  repeat
    if ticket == '?' then
      page = redis.call('ZREVRANGE', queue, from, from + 63)
    else
      page = redis.call('ZRANGEBYSCORE', queue, ticket, ticket)
    end
    for _, entry in ipairs(page) do
      if string.sub(entry, 1, #mine) == mine then
        return entry
      end
    end
    from = from + 64
  until ticket ~= '?' or #page < 64
  return nil
end

