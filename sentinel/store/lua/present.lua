#!lua
-- A gateway says that it is there. KEYS: the hash of gateways. ARGV: its id, what it says (JSON), for how long (ms), how long lost
-- ones are kept (ms). Each value is "<end by this server's clock, ms> <JSON>".
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  return redis.error_reply('ERR ' .. KEYS[1] .. ' is a ' .. kind .. '; wanted a hash')
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + tonumber(ARGV[3]), ARGV[2]))

local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local ends = tonumber(string.match(entries[i + 1], '^%d+'))
  if ends and ends + tonumber(ARGV[4]) < now then
    redis.call('HDEL', KEYS[1], entries[i])
  end
end
return 1
