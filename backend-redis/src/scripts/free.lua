-- Free: the claim does not hold the lock any more. The queue is left as it is: this names the lock alone,
-- and so works while the lock's slot migrates. Whoever asks again from the queue finds the lock free.
--
-- KEYS  1 the lock
-- ARGV  1 'leasehold:1 <claim> ', the lock's value in front of the token
--
-- Returns 1 if the claim held the lock, else 0.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
