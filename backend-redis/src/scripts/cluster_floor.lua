-- In a cluster: the floor is this node's clock at least. Stands in front of whatever mints tokens.
--
-- A slot comes to a node that its client may have known for days. The counter of the slot may be older
-- there than the last token that the node before has given, and nobody who asks may know that token.
local time = redis.call('TIME')
ARGV[1] = string.format('%.0f', math.max(tonumber(ARGV[1]), time[1] * 1000000 + time[2]))

