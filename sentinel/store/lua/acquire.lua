#!lua
-- Take the lease if nobody else holds it. KEYS: lease, epoch counter, which server counted last.
-- ARGV: token, holder, url, ttl (ms), highest epoch seen. Returns {1, the new epoch, the highest one known before}, or
-- {0, the holder's epoch} while another token holds the lease. The server ends the lease (PEXPIRE), nobody else.
local LOST = 1000  -- epochs given by a server whose last seconds are lost: a candidate asks a few times a second at most

local function misfit(key, want)
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= want then
    return redis.error_reply('ERR ' .. key .. ' is a ' .. kind .. '; wanted a ' .. want)
  end
end

local wrong = misfit(KEYS[1], 'hash') or misfit(KEYS[2], 'string') or misfit(KEYS[3], 'string')
if wrong then return wrong end

if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then
    if redis.call('PTTL', KEYS[1]) == -1 then  -- a lease of ours always has an end; this one would block for ever
      return redis.error_reply('ERR ' .. KEYS[1] .. ' never ends, so it is no lease; wanted a hash with an expiry')
    end
    return {0, tonumber(redis.call('HGET', KEYS[1], 'epoch')) or 0}
  end
end

local counter = tonumber(redis.call('GET', KEYS[2]) or '0')
if not counter then
  return redis.error_reply('ERR ' .. KEYS[2] .. ' is no number; wanted the epoch counter')
end

-- After a flush or a failover the counter may have gone back; those who remember a higher epoch carry it on. What nobody
-- here remembers may still have been given, and be in use, by a server that lost it: one that has restarted or was the primary
-- before. Each life of a server as primary has a replication id of its own, so it shows, and the counter leaps over that.
local home = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
local known = math.max(counter, tonumber(ARGV[5]))
local leap = (counter > 0 and redis.call('GET', KEYS[3]) ~= home) and LOST or 0
local epoch = string.format('%.0f', known + leap + 1)
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[3], home)
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'holder', ARGV[2], 'url', ARGV[3], 'epoch', epoch, 'seq', '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {1, tonumber(epoch), known}
