#!lua
-- The gateways, as of one moment. KEYS: the hash of gateways. Returns this server's clock (ms), then id and value of each.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  return redis.error_reply('ERR ' .. KEYS[1] .. ' is a ' .. kind .. '; wanted a hash')
end

local time = redis.call('TIME')
local answer = redis.call('HGETALL', KEYS[1])
table.insert(answer, 1, string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)))
return answer
