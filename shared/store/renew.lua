-- Registers a member, or renews its lease and load, in one step.
-- KEYS: 1 the member's record, 2 the index of its kind, 3 its load, 4 the cluster's version, 5 the index of workers,
--       6... what else lives as long as the lease
-- ARGV: 1 incarnation, 2 "register" or "renew", 3 record, 4 load ("" for none), 5 lease ms, 6 index ttl ms,
--       7 late ms (the lease, if not given)
-- Returns the version, which grows when a member comes or goes, and while a worker is late, or 0 when the lease to renew is
-- not there any more; then nothing was written.
if ARGV[2] == "renew" and redis.call("EXISTS", KEYS[1]) == 0 then
  return 0
end
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = tonumber(ARGV[5])
redis.call("SET", KEYS[1], ARGV[3], "PX", lease)
if ARGV[4] ~= "" then
  redis.call("SET", KEYS[3], ARGV[4], "PX", lease)
end
for i = 6, #KEYS do
  redis.call("PEXPIRE", KEYS[i], lease)
end
redis.call("ZADD", KEYS[2], now, ARGV[1])
local ended = "(" .. now - lease
local gone = redis.call("ZREMRANGEBYSCORE", KEYS[2], "-inf", ended)
if KEYS[5] ~= KEYS[2] then
  gone = gone + redis.call("ZREMRANGEBYSCORE", KEYS[5], "-inf", ended)
end
local late = redis.call("ZCOUNT", KEYS[5], "-inf", now - tonumber(ARGV[7] or ARGV[5]))
if gone > 0 or late > 0 or ARGV[2] == "register" then
  redis.call("INCR", KEYS[4])
end
redis.call("PEXPIRE", KEYS[2], ARGV[6])
redis.call("PEXPIRE", KEYS[4], ARGV[6])
return tonumber(redis.call("GET", KEYS[4]) or 1)
