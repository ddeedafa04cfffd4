#!lua
-- Write a batch of decisions if the lease is ours: all of it, or none.
-- KEYS: lease, routes, one hash per table, head. ARGV: token, epoch, sequence number, that of the last commit known done
-- under this epoch (-1: write anyway), then four per change:
--   'put', index into KEYS, field, value | 'drop', index into KEYS, field, '' | 'routes', 2, version, table as JSON
-- Returns 'ok', 'fenced' (the lease is not ours), 'late' (a later commit of this epoch is already here), 'lost'
-- (an earlier commit of this epoch is not), or 'stale …' (the route table's version does not rise). Everything that can go wrong is checked before the first write.
for i, key in ipairs(KEYS) do
  local want = (i == 2 or i == #KEYS) and 'string' or 'hash'
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= want then
    return redis.error_reply('ERR ' .. key .. ' is a ' .. kind .. '; wanted a ' .. want)
  end
end

local held = redis.call('HMGET', KEYS[1], 'token', 'epoch', 'seq')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 'fenced' end
if (tonumber(held[3]) or 0) >= tonumber(ARGV[3]) then return 'late' end
if (tonumber(held[3]) or 0) < tonumber(ARGV[4]) then return 'lost' end

local standing = redis.call('GET', KEYS[2])
local version = nil
for i = 5, #ARGV, 4 do
  if ARGV[i] == 'routes' then
    if version == nil then
      version = -1
      if standing then
        local readable, routes = pcall(cjson.decode, standing)
        if not readable or type(routes) ~= 'table' then
          return redis.error_reply('ERR ' .. KEYS[2] .. ' is no route table; wanted JSON')
        end
        version = tonumber(routes.version) or 0
      end
    end
    local new = tonumber(ARGV[i + 2])
    if new < version or (new == version and ARGV[i + 3] ~= standing) then
      return string.format('stale version %.0f does not rise above %.0f', new, version)
    end
    version = new
    standing = ARGV[i + 3]
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
  else
    redis.call('SET', key, ARGV[i + 3])
    redis.call('PUBLISH', key, ARGV[i + 3])
  end
end
return 'ok'
