#!lua
-- The gateways: one says that it is there, or somebody asks who is.
-- KEYS: the hash of gateways, id → "<end by this server's clock, ms> <JSON>"; the hash that says since when (born) and when last
-- anybody spoke of them here. ARGV (ms): for how long lost ones are kept; after how long without a word nobody could speak; how
-- long everybody has to speak then. A speaker adds its id, what it says (JSON), and for how long (ms).
-- Returns 1 to a speaker; to others this server's clock and since when it knows (ms), then id and value of each.
for _, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= 'hash' then
    return redis.error_reply('ERR ' .. key .. ' is a ' .. kind .. '; wanted a hash')
  end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local kept, away, settle = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local function whole(n) return string.format('%.0f', n) end

local function each(change)  -- new end of an entry, false: remove it, nil: leave it
  local entries = redis.call('HGETALL', KEYS[1])
  for i = 1, #entries, 2 do
    local digits, rest = string.match(entries[i + 1], '^(%d+)( .*)$')
    local ends = digits and change(tonumber(digits))
    if ends then
      redis.call('HSET', KEYS[1], entries[i], whole(ends) .. rest)
    elseif ends == false then
      redis.call('HDEL', KEYS[1], entries[i])
    end
  end
end

-- No word from anybody: they could not speak, or spoke with another server. What then ran out says nothing of its gateway.
local heard = redis.call('HMGET', KEYS[2], 'born', 'last')
local born, last = tonumber(heard[1] or ''), tonumber(heard[2] or '')
if not born or not last or now - last > kept then
  born = now  -- a new server, or one that lost its data or holds those of long ago: others may be there, too
elseif now - last > away or now < last then
  each(function(ends)
    local left = ends - last  -- when somebody last spoke
    return now + (left > 0 and math.max(left, settle) or left)
  end)
end
redis.call('HSET', KEYS[2], 'born', whole(born), 'last', whole(now))

if ARGV[4] then
  redis.call('HSET', KEYS[1], ARGV[4], whole(now + tonumber(ARGV[6])) .. ' ' .. ARGV[5])
  each(function(ends) if ends + kept < now then return false end end)
  return 1
end
local answer = redis.call('HGETALL', KEYS[1])
table.insert(answer, 1, whole(now))
table.insert(answer, 2, whole(born))
return answer
