#!lua
-- Write a batch of decisions if the lease is ours: all of it, or none.
-- KEYS: lease, routes, list of news since then, one hash per table, head. ARGV: token, epoch, sequence number, that of the last
-- commit known done under this epoch (-1: write anyway), then four per change:
--   'put', index into KEYS, field, value | 'drop', index into KEYS, field, '' | 'routes', 2, version, table as JSON |
--   'news', 3, '<version before> <version>', news as JSON
-- Returns 'ok', 'fenced' (the lease is not ours), 'late' (a later commit of this epoch is already here), 'lost' (an earlier commit
-- of this epoch is not), 'gap' (news do not build on what is here), or 'stale …' (the route table's version does not rise).
-- Everything that can go wrong is checked before the first write.
local wants = {[2] = 'string', [3] = 'list', [#KEYS] = 'string'}
for i, key in ipairs(KEYS) do
  local want = wants[i] or 'hash'
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= want then
    return redis.error_reply('ERR ' .. key .. ' is a ' .. kind .. '; wanted a ' .. want)
  end
end

local held = redis.call('HMGET', KEYS[1], 'token', 'epoch', 'seq')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 'fenced' end
if (tonumber(held[3]) or 0) >= tonumber(ARGV[3]) then return 'late' end
if (tonumber(held[3]) or 0) < tonumber(ARGV[4]) then return 'lost' end

-- A version stands at the head of what we write; only for what others wrote is all of it read.
local function version_of(text)
  return tonumber(string.match(text or '', '^{"type":"Route%a+","version":(%d+)[,}]'))
end

local version, whole, text = nil, true, nil  -- of the newest table; whether it stands there as a whole; then its text, once ours
local unreadable = nil
local function look()
  if version then return end
  version = version_of(redis.call('GETRANGE', KEYS[2], 0, 63))
  if not version then
    local standing = redis.call('GET', KEYS[2])
    local readable, routes = pcall(cjson.decode, standing or '{}')
    if not readable or type(routes) ~= 'table' then
      unreadable = redis.error_reply('ERR ' .. KEYS[2] .. ' is no route table; wanted JSON')
      return
    end
    version = standing and (tonumber(routes.version) or 0) or -1
  end
  local news = version_of(redis.call('LINDEX', KEYS[3], -1))
  if news and version >= 0 and news > version then version, whole = news, false end
end

local told = {}  -- news that are here already: their first answer was lost
for i = 5, #ARGV, 4 do
  if ARGV[i] == 'routes' then
    look()
    if unreadable then return unreadable end
    local new = tonumber(ARGV[i + 2])
    if new < version or (new == version and whole and ARGV[i + 3] ~= (text or redis.call('GET', KEYS[2]))) then
      return string.format('stale version %.0f does not rise above %.0f', new, version)
    end
    version, whole, text = new, true, ARGV[i + 3]
  elseif ARGV[i] == 'news' then
    look()
    if unreadable then return unreadable end
    local before, new = string.match(ARGV[i + 2], '^(%d+) (%d+)$')
    if tonumber(new) == version and not whole and redis.call('LINDEX', KEYS[3], -1) == ARGV[i + 3] then
      told[i] = true
    elseif tonumber(before) ~= version or tonumber(new) <= version then
      return 'gap'
    else
      version, whole = tonumber(new), false
    end
  end
end

redis.call('HSET', KEYS[1], 'seq', ARGV[3])
redis.call('SET', KEYS[#KEYS], ARGV[2] .. ' ' .. ARGV[3])
for i = 5, #ARGV, 4 do
  local key = KEYS[tonumber(ARGV[i + 1])]
  if ARGV[i] == 'put' then
    redis.call('HSET', key, ARGV[i + 2], ARGV[i + 3])
  elseif ARGV[i] == 'drop' then
    redis.call('HDEL', key, ARGV[i + 2])
  elseif ARGV[i] == 'routes' then
    redis.call('SET', key, ARGV[i + 3])
    redis.call('DEL', KEYS[3])
    redis.call('PUBLISH', key, ARGV[i + 3])
  elseif not told[i] then
    redis.call('RPUSH', key, ARGV[i + 3])
    redis.call('PUBLISH', key, ARGV[i + 3])
  end
end
return 'ok'
