#!lua
-- Extend the lease if it is still ours. KEYS: lease. ARGV: token, epoch, ttl (ms). Returns 1, or 0 when it is not ours.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  return redis.error_reply('ERR ' .. KEYS[1] .. ' is a ' .. kind .. '; wanted a hash')
end

local held = redis.call('HMGET', KEYS[1], 'token', 'epoch')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
