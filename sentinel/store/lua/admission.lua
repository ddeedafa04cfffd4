#!lua
-- One owner (a gateway process) says what it holds of each limit and what it would like; the answer is what it may hold.
-- KEYS: 1 owners, 2 the memory of all this, then one hash for each limit: owner → 'allotment demand head'.
-- ARGV: 1 owner, 2 sequence number, 3 '1' for everything that it holds (which also registers it), 4 lease (ms), 5 owners that it last
--       knew of, 6 how long a turn lasts (ms), then five for each limit: the limit, keep, demand, want, head.
--   keep    it goes on holding at least this, and holds no more until it has the answer; never refused: these are requests that run
--   demand  running and waiting; want: demand and what it would hold ready; head: what the first that waits needs
-- Returns 'lost' (not registered, nothing was written), 'late' (overtaken by a later statement), or 'ok', the fence (rises with every
-- answer), milliseconds of settling left, owners alive, then what it may hold of each limit. That may be below what it uses: then it
-- admits nothing until enough has ended. Saying the same again is harmless. Time is the server's, in milliseconds.
-- Nothing is counted up or down: an owner whose lease is over is left out of every sum, whatever it held.
local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function whole(n) return string.format('%.0f', n) end

for _, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= 'hash' then
    return redis.error_reply('ERR ' .. key .. ' is a ' .. kind .. '; wanted a hash')
  end
end

local owner, seq, full, lease = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local now, alive, owners, dead = clock(), {}, 0, {}
local listed = redis.call('HGETALL', KEYS[1])
for i = 1, #listed, 2 do
  local ends, said = string.match(listed[i + 1], '^(%d+) (%d+)$')
  if ends and tonumber(ends) > now then
    alive[listed[i]], owners = tonumber(said), owners + 1
  elseif #dead < 64 then
    dead[#dead + 1] = listed[i]
  end
end
if #dead > 0 then redis.call('HDEL', KEYS[1], unpack(dead)) end
if not full and not alive[owner] then return { 'lost' } end
if alive[owner] and seq <= alive[owner] then return { 'late' } end
local first = owners == 0
if not alive[owner] then owners = owners + 1 end
alive[owner] = seq
redis.call('HSET', KEYS[1], owner, whole(now + lease) .. ' ' .. whole(seq))

-- A store that lost its data, is another one after a failover, or was away for longer than a lease does not know what is held: until
-- every living owner has said it (they do so in a lease at the latest) nobody gets more than its equal part, or one large request.
-- Which server this is, only INFO tells, and that takes a sixth as long as all of this on Redis, three tenths on Valkey (measured). So
-- it is asked when somebody says everything, as each owner does three times in a lease and after each question that failed; until the
-- first does, what a replica had not heard yet may be given twice.
local memory = redis.call('HMGET', KEYS[2], 'run', 'settled')
local settled = tonumber(memory[2]) or 0
if full then
  local told, info = pcall(redis.call, 'INFO', 'server')  -- some services forbid it; then only lost data is noticed
  local run = told and string.match(info, 'run_id:(%x+)') or 'unknown'
  if memory[1] ~= run or first then
    settled = now + lease
    redis.call('HSET', KEYS[2], 'run', run, 'settled', whole(settled))
  end
end
local fence = redis.call('HINCRBY', KEYS[2], 'fence', 1)

local function fair(limit, rest)  -- my part when more is wanted than there is; rest: {owner, demand, head} of all who want some
  table.sort(rest, function(a, b) return a[2] < b[2] or (a[2] == b[2] and a[1] < b[1]) end)
  local left, many, at = limit, #rest, 1
  while many > 0 and rest[at][2] * many <= left do  -- who wants no more than an equal part gets it
    if rest[at][1] == owner then return rest[at][2] end
    left, many, at = left - rest[at][2], many - 1, at + 1
  end
  local names, by = {}, {}
  for i = at, #rest do
    names[#names + 1], by[rest[i][1]] = rest[i][1], rest[i]
  end
  table.sort(names)
  local turn = names[math.floor(now / tonumber(ARGV[6])) % many + 1]
  local each = math.floor(left / many)
  local first_part = left - each * (many - 1)  -- the one whose turn it is gets what does not divide, and enough for one request
  local head = math.min(by[turn][3], left)
  if head > first_part and many > 1 then first_part, each = head, math.floor((left - head) / (many - 1)) end
  return owner == turn and first_part or each
end

local answer = { 'ok', fence, math.max(0, settled - now), owners }
for i = 3, #KEYS do
  local at = 7 + (i - 3) * 5
  local limit, keep, demand, want, head = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local held, wanted, rest, gone = 0, demand, {}, {}
  if demand > 0 then rest[1] = { owner, demand, head } end
  local entries = redis.call('HGETALL', KEYS[i])
  for j = 1, #entries, 2 do
    local name = entries[j]
    local a, d, h = string.match(entries[j + 1], '^(%d+) (%d+) (%d+)$')
    if not a or not alive[name] then
      if #gone < 64 then gone[#gone + 1] = name end
    elseif name ~= owner then
      held, wanted = held + a, wanted + d
      if tonumber(d) > 0 then rest[#rest + 1] = { name, tonumber(d), tonumber(h) } end
    end
  end
  if #gone > 0 then redis.call('HDEL', KEYS[i], unpack(gone)) end
  local part
  if now < settled then
    part = math.max(1, math.floor(limit / math.max(owners, tonumber(ARGV[5]))))
    if keep == 0 then part = math.max(part, head) end  -- who holds nothing may have one request that is larger than that
    part = math.min(want, part)
  elseif wanted <= limit then  -- half of what nobody wants may be held ready, the other half is for who comes
    part = demand + math.min(want - demand, math.floor((limit - wanted) / (2 * owners)))
  else
    part = math.min(demand, fair(limit, rest))
  end
  local allotted = math.max(keep, math.min(part, limit - held))
  if allotted == 0 and demand == 0 then
    redis.call('HDEL', KEYS[i], owner)
  else
    redis.call('HSET', KEYS[i], owner, whole(allotted) .. ' ' .. whole(demand) .. ' ' .. whole(head))
    redis.call('PEXPIRE', KEYS[i], whole(lease * 3))  -- every owner says it again within its lease
  end
  answer[#answer + 1] = math.min(allotted, part)
end
return answer
