
end
local function release(KEYS, ARGV)
