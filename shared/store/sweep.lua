-- Closes records whose router is gone, each only if it still is as it was when it was judged.
-- KEYS: 1 index of the routers with open records, 2 the router's lease, 3 its open records,
--       4... the records
-- ARGV: 1 the router, 2 who sweeps, 3 ttl ms, 4 rank from which a phase is final, 5 phase, 6 rank,
--       then 3 per record: leg, attempt, nonce
-- Returns the number of records closed here, or -1 when the router holds a lease: then none was.
if redis.call("EXISTS", KEYS[2]) == 1 then
  return -1
end
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local closed = 0
for i = 4, #KEYS do
  local at = 7 + (i - 4) * 3
  local known = redis.pcall("HMGET", KEYS[i], "router", "rank", "attempt", "nonce")
  if known.err or not known[1] then
    redis.call("ZREM", KEYS[3], ARGV[at])
  elseif known[1] == ARGV[1] and (tonumber(known[2]) or 0) < tonumber(ARGV[4])
    and known[3] == ARGV[at + 1] and known[4] == ARGV[at + 2] then
    redis.call("HSET", KEYS[i], "phase", ARGV[5], "rank", ARGV[6], "swept_by", ARGV[2],
      "updated_ms", now)
    redis.call("PEXPIRE", KEYS[i], ARGV[3])
    redis.call("ZREM", KEYS[3], ARGV[at])
    closed = closed + 1
  end
end
if redis.call("ZCARD", KEYS[3]) == 0 then
  redis.call("ZREM", KEYS[1], ARGV[1])
end
return closed
