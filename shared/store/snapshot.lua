-- Everything a router needs to know about the cluster, at one instant. Writes nothing.
-- KEYS: 1 index of workers, 2 index of routers
-- ARGV: 1 prefix of records, 2 prefix of loads, 3 prefix of assigned tokens, 4 lease ms,
--       5 delivery ms, 6 bucket ms
-- Returns {live routers, {incarnation, record, load, tokens assigned since the load, ms since its
-- last renewal} per worker}.
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local oldest = "(" .. now - tonumber(ARGV[4])
local live = redis.call("ZRANGEBYSCORE", KEYS[1], oldest, "+inf", "WITHSCORES")
local workers = {}
for i = 1, #live, 2 do
  local incarnation, reported = live[i], tonumber(live[i + 1])
  -- A key of another type answers with an error table: no record.
  local record = redis.pcall("GET", ARGV[1] .. incarnation)
  if type(record) == "string" then
    local assigned = 0
    local buckets = redis.call("HGETALL", ARGV[3] .. incarnation)
    for j = 1, #buckets, 2 do
      if (buckets[j] + 1) * tonumber(ARGV[6]) > reported - tonumber(ARGV[5]) then
        assigned = assigned + buckets[j + 1]
      end
    end
    local load = redis.pcall("GET", ARGV[2] .. incarnation)
    if type(load) ~= "string" then
      load = ""
    end
    workers[#workers + 1] = { incarnation, record, load, assigned, math.max(now - reported, 0) }
  end
end
return { redis.call("ZRANGEBYSCORE", KEYS[2], oldest, "+inf"), workers }
