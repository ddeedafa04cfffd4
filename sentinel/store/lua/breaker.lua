#!lua
-- One worker's shared breaker: every question and every transition. Time is the server's, in milliseconds.
-- KEYS: 1 the channel, 2 the pool's panic mark, 3 the worker's record, 4… the records of the pool's other workers.
--       seen: 3… the records told of. list: 2… the pools' panic marks, then the records.
-- ARGV: 1 verb, 2 worker, 3 pool, 4 window (s), 5 least requests, 6 failure rate, 7 reporters, 8 base and 9 longest open time (ms),
--       10 jitter, 11 probes, 12 probe lease (ms), 13 largest share open; from 14 on, by verb:
--   seen    reporter, then per record: version, fine             → versions that stand, 0 where there is no record
--   failed  reporter, version, fine, failed, draw in [0, 1)      → what stands
--   permit  id                                                   → what stands, and 1 when the probe may go
--   ended   id, 'fine' | 'failed' | 'neutral', draw in [0, 1)    → what stands
--   renew   ids of probes                                        → how many of them are still held
--   pin     'open' | 'closed' | '', lasts (ms), by, why          → what stands; a person's pin is not sentinel's to change
--   list    number of pools, 1 for evidence, then the pools' names, then per record: worker, pool   → the time, milliseconds that each
--           pool's panic lasts on, then for each record what stands; without evidence, of one plainly closed its version only
-- A reporter is written host/process: hosts are what must agree. A record holds state, version (rises with every transition and
-- with the clock, also over a store that lost its data), until, trips, since, wins, why, seen_by (hosts that saw what opened it,
-- with spaces between), pin, pin_until, pin_by, one field 'r:reporter' with what it saw in each second, swept (second in which those
-- of silent reporters were dropped last), freed (when it was last told that a probe is free), one 'p:id' with the end of each probe's
-- lease, and one 'w:id' for each that succeeded: it is told 'fine' with its first byte, and 'failed' as well when the rest of its
-- answer broke.
local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local verb, worker, pool = ARGV[1], ARGV[2], ARGV[3]
local window, least, rate, reporters = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local base, longest, jitter = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local probes, lease, share = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local now = clock()
local this_second = math.floor(now / 1000)
local KEPT = 86400000  -- a record that nobody touches for a day is forgotten
local SWEEPS = 8  -- records looked through for silent reporters in one question, at most: the others' turn comes with the next
local PAUSE = 100  -- ms between two words that a probe is free again: with a full pool each probe ends as soon as it is given

local function whole(n) return string.format('%.0f', n) end

local function lately(second)  -- in the window; one that is to come was written by a clock that ran ahead, but for the next: clocks differ
  return second > this_second - window and second <= this_second + 1
end

local function read(key, ...)  -- these fields of a record
  local found = redis.pcall('HMGET', key, ...)
  if not found.err then return found end
  local kind = redis.call('TYPE', key).ok
  error(kind == 'hash' and found or { err = 'ERR ' .. key .. ' is a ' .. kind .. '; wanted a breaker' })
end

local function load(key)
  local f = read(key, 'state', 'version', 'until', 'trips', 'since', 'wins', 'pin', 'pin_until', 'pin_by', 'why', 'seen_by', 'swept', 'freed')
  local r = { key = key, state = f[1] or 'closed', version = tonumber(f[2]) or 0, ends = tonumber(f[3]) or 0, trips = tonumber(f[4]) or 0,
    since = tonumber(f[5]) or 0, wins = tonumber(f[6]) or 0, pin = '', pin_ends = 0, pin_by = '', why = f[10] or '', seen_by = f[11] or '',
    swept = tonumber(f[12]) or 0, freed = tonumber(f[13]) or 0 }
  if f[7] and (tonumber(f[8]) or 0) > now then
    r.pin, r.pin_ends, r.pin_by = f[7], tonumber(f[8]), f[9] or ''
  end
  return r
end

local function out(key)  -- whether a worker of the pool gets no ordinary traffic
  local r = load(key)
  return r.pin == 'open' or (r.pin == '' and r.state ~= 'closed')
end

local function fields(key, kind)  -- field without its kind → value
  local found, all = {}, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == kind then found[string.sub(all[i], 3)] = all[i + 1] end
  end
  return found
end

local function host_of(reporter)
  return string.match(reporter, '^(.*)/[^/]*$') or reporter
end

local function counted(key)  -- requests and failures in the window; hosts that saw traffic, and failures. Drops who saw nothing
  local c = { volume = 0, failed = 0, seen = 0, sick = 0, hosts = {} }
  local seen, sick = {}, {}
  for reporter, told in pairs(fields(key, 'r:')) do
    local host, silent = host_of(reporter), true
    for second, fine, failed in string.gmatch(told, '(%d+) (%d+) (%d+)') do
      if lately(tonumber(second)) then
        silent = false
        c.volume, c.failed, seen[host] = c.volume + fine + failed, c.failed + failed, true
        if tonumber(failed) > 0 then sick[host] = true end
      end
    end
    if silent and verb ~= 'list' then redis.call('HDEL', key, 'r:' .. reporter) end  -- the controller lists by a window of its own
  end
  for _ in pairs(seen) do c.seen = c.seen + 1 end
  for host in pairs(sick) do
    c.sick = c.sick + 1
    c.hosts[c.sick] = host
  end
  table.sort(c.hosts)
  return c
end

local panics = {}  -- mark → milliseconds left: a listing is of many workers and few pools
local function panic_left(mark)
  panics[mark] = panics[mark] or math.max(0, redis.call('PTTL', mark))
  return panics[mark]
end

local function told(r, name, of, panic, evidence)
  local m = { worker = name, pool = of, state = r.state, version = r.version, left = math.max(0, r.ends - now), trips = r.trips,
    since = r.since, wins = r.wins, why = r.why, pin = r.pin, pin_left = math.max(0, r.pin_ends - now), pin_by = r.pin_by,
    panic_left = panic_left(panic), now = now, hosts = r.seen_by }
  if evidence then
    local c = counted(r.key)
    m.volume, m.failed = c.volume, c.failed
    if r.state == 'closed' then m.hosts = table.concat(c.hosts, ' ') end
  end
  return cjson.encode(m)
end

local function publish(r)
  local message = told(r, worker, pool, KEYS[2])
  redis.call('PUBLISH', KEYS[1], message)
  return message
end

local function keep(r)
  redis.call('PEXPIRE', r.key, whole(math.max(KEPT, r.ends - now + KEPT, r.pin_ends - now + KEPT)))
end

local function turn(r, state, ends, why)
  for id in pairs(fields(r.key, 'r:')) do redis.call('HDEL', r.key, 'r:' .. id) end
  for id in pairs(fields(r.key, 'p:')) do redis.call('HDEL', r.key, 'p:' .. id) end
  for id in pairs(fields(r.key, 'w:')) do redis.call('HDEL', r.key, 'w:' .. id) end
  r.state, r.version, r.ends, r.since, r.wins, r.why = state, math.max(r.version + 1, now), ends, now, 0, why
  if state == 'closed' then r.seen_by = '' end
  redis.call('HSET', r.key, 'state', state, 'version', whole(r.version), 'until', whole(ends), 'trips', whole(r.trips),
    'since', whole(now), 'wins', '0', 'why', why, 'seen_by', r.seen_by)
  keep(r)
  return publish(r)
end

local function open(r, draw, why, hosts)  -- hosts: one or more, with spaces between
  local calm = r.state == 'closed' and r.since > 0 and now - r.since > longest
  r.trips = calm and 1 or r.trips + 1
  for host in string.gmatch(hosts, '%S+') do
    if not string.find(' ' .. r.seen_by .. ' ', ' ' .. host .. ' ', 1, true) and #r.seen_by < 500 then
      r.seen_by = r.seen_by == '' and host or r.seen_by .. ' ' .. host
    end
  end
  local lasts = math.min(longest, base * r.trips) * (1 + jitter * draw)
  return turn(r, 'open', now + math.floor(lasts), why)
end

local sweeps = 0
local function count(r, reporter, fine, failed)
  local kept = {}
  for at, f, x in string.gmatch(redis.call('HGET', r.key, 'r:' .. reporter) or '', '(%d+) (%d+) (%d+)') do
    if tonumber(at) == this_second then
      fine, failed = fine + f, failed + x
    elseif lately(tonumber(at)) then
      kept[#kept + 1] = at .. ' ' .. f .. ' ' .. x
    end
  end
  kept[#kept + 1] = whole(this_second) .. ' ' .. whole(fine) .. ' ' .. whole(failed)
  redis.call('HSET', r.key, 'r:' .. reporter, table.concat(kept, ';'))
  if not lately(r.swept) and sweeps < SWEEPS then  -- once a window: each boot of a gateway is a reporter of its own
    sweeps = sweeps + 1
    counted(r.key)
    redis.call('HSET', r.key, 'swept', whole(this_second))
  end
end

if verb == 'seen' then
  local versions = {}
  for i = 3, #KEYS do
    local version, fine = ARGV[15 + (i - 3) * 2], tonumber(ARGV[16 + (i - 3) * 2])
    local r = load(KEYS[i])
    versions[i - 2] = r.version
    if r.state == 'closed' and whole(r.version) == version then
      count(r, ARGV[14], fine, 0)
      keep(r)
    end
  end
  return versions
end

if verb == 'list' then
  local pools, evidence, marks, lefts, found = tonumber(ARGV[14]), ARGV[15] == '1', {}, {}, {}
  for i = 1, pools do marks[ARGV[15 + i]], lefts[i] = KEYS[1 + i], panic_left(KEYS[1 + i]) end
  for i = 2 + pools, #KEYS do
    local short = not evidence and read(KEYS[i], 'state', 'version', 'pin')
    if short and (short[1] or 'closed') == 'closed' and (short[3] or '') == '' then
      found[#found + 1] = tonumber(short[2]) or 0  -- nearly all of them, every second, for every gateway
    else
      local at = 16 + pools + (i - 2 - pools) * 2
      found[#found + 1] = told(load(KEYS[i]), ARGV[at], ARGV[at + 1], marks[ARGV[at + 1]], evidence)
    end
  end
  return { now, lefts, found }
end

local r = load(KEYS[3])

if verb == 'failed' then
  local reporter, version, fine, failed, draw = ARGV[14], ARGV[15], tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18])
  if r.state ~= 'closed' or whole(r.version) ~= version then return told(r, worker, pool, KEYS[2]) end
  count(r, reporter, fine, failed)
  keep(r)
  local c = counted(r.key)
  if r.pin ~= '' or failed == 0 or c.volume < least or c.failed < rate * c.volume or c.sick < math.min(reporters, c.seen) then
    return told(r, worker, pool, KEYS[2])
  end
  local opened, total = 1, #KEYS - 2
  for i = 4, #KEYS do
    if out(KEYS[i]) then opened = opened + 1 end
  end
  if opened > share * total or opened >= total then  -- it would be too many: all are tried, and a person is told
    if panic_left(KEYS[2]) >= window * 1000 then return told(r, worker, pool, KEYS[2]) end  -- everybody has heard
    redis.call('SET', KEYS[2], whole(now), 'PX', whole(window * 1500))  -- so that each failure leaves at least a window of it
    panics[KEYS[2]] = nil
    return publish(r)
  end
  local why = whole(c.failed) .. ' of ' .. whole(c.volume) .. ' requests failed in ' .. whole(window) .. ' s, seen by ' .. table.concat(c.hosts, ', ')
  return open(r, draw, why, table.concat(c.hosts, ' '))
end

if verb == 'permit' then
  if r.pin ~= '' or r.state == 'closed' or (r.state == 'open' and now < r.ends) then return { told(r, worker, pool, KEYS[2]), 0 } end
  if r.state == 'open' then turn(r, 'half_open', 0, 'its time is over') end
  local held, first = 0, nil
  for id, ends in pairs(fields(r.key, 'p:')) do
    ends = tonumber(ends)
    if ends <= now then
      redis.call('HDEL', r.key, 'p:' .. id)  -- its holder died or hung: the probe is free again
    else
      held, first = held + 1, math.min(first or ends, ends)
    end
  end
  if held + r.wins >= probes then
    r.ends = first or now
    return { told(r, worker, pool, KEYS[2]), 0 }
  end
  redis.call('HSET', r.key, 'p:' .. ARGV[14], whole(now + lease))
  keep(r)
  return { told(r, worker, pool, KEYS[2]), 1 }
end

if verb == 'ended' then
  local held = tonumber(redis.call('HGET', r.key, 'p:' .. ARGV[14]) or '0') > now
  local broke = ARGV[15] == 'failed' and redis.call('HEXISTS', r.key, 'w:' .. ARGV[14]) == 1  -- an answer that had begun well
  redis.call('HDEL', r.key, 'p:' .. ARGV[14])
  if r.state ~= 'half_open' or not (held or broke) then return told(r, worker, pool, KEYS[2]) end
  if ARGV[15] == 'failed' then return open(r, tonumber(ARGV[16]), 'a probe failed', host_of(ARGV[14])) end
  if ARGV[15] == 'fine' then
    r.wins = r.wins + 1
    if r.wins >= probes then return turn(r, 'closed', 0, whole(r.wins) .. ' probes succeeded') end
    redis.call('HSET', r.key, 'wins', whole(r.wins), 'w:' .. ARGV[14], '1')
    return told(r, worker, pool, KEYS[2])
  end
  if r.freed <= now and now < r.freed + PAUSE then return told(r, worker, pool, KEYS[2]) end
  redis.call('HSET', r.key, 'freed', whole(now))
  return publish(r)  -- it said nothing: the probe is free for whoever asks first
end

if verb == 'renew' then
  local held = 0
  for i = 14, #ARGV do
    if tonumber(redis.call('HGET', r.key, 'p:' .. ARGV[i]) or '0') > now then
      redis.call('HSET', r.key, 'p:' .. ARGV[i], whole(now + lease))
      held = held + 1
    end
  end
  return held
end

if verb == 'pin' then
  local ours = ARGV[16] == 'sentinel'
  if ours and ((r.pin ~= '' and r.pin_by ~= 'sentinel') or (r.pin == '' and ARGV[14] == '')) then return told(r, worker, pool, KEYS[2]) end
  r.pin, r.pin_ends, r.pin_by = ARGV[14], ARGV[14] == '' and 0 or now + tonumber(ARGV[15]), ARGV[16]
  r.version = math.max(r.version + 1, now)
  if ARGV[17] ~= '' then r.why = ARGV[17] end
  redis.call('HSET', r.key, 'state', r.state, 'version', whole(r.version), 'pin', r.pin, 'pin_until', whole(r.pin_ends), 'pin_by', r.pin_by, 'why', r.why)
  keep(r)
  return publish(r)
end

return redis.error_reply('ERR breaker.lua: no such verb: ' .. verb)
