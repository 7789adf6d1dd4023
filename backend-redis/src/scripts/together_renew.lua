
end
local function renew(KEYS, ARGV)
