-- Many calls in one, see together.lua: each script as a function of its own keys and arguments.
local function acquire(KEYS, ARGV)
