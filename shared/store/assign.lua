-- Gives work to the least loaded candidate and adds the work to its load, in one step.
-- A candidate's load is what it reported plus what was assigned since that report. Assigned tokens
-- are kept in buckets of time, so they age out with the next report and no counter can drift.
-- KEYS: 1 index of workers, 2 the leg's assignments
-- ARGV: 1 prefix of loads, 2 prefix of assigned tokens, 3 delivery ms, 4 bucket ms,
--       5 assigned ttl ms, 6 router, 7 cost in tokens, 8... candidates, the preferred first
-- Returns the chosen incarnation, or "" when no candidate holds a lease (a load lives as long).
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bucket_ms = tonumber(ARGV[4])
local best, best_tokens, best_running = "", math.huge, math.huge
for i = 8, #ARGV do
  local reported = tonumber(redis.call("ZSCORE", KEYS[1], ARGV[i]) or "0")
  local load = redis.pcall("GET", ARGV[1] .. ARGV[i])
  if type(load) == "string" then
    local parsed, fields = pcall(cjson.decode, load)
    local known = parsed and type(fields) == "table"
    local tokens = known and tonumber(fields.waiting_tokens) or 0
    local running = known and tonumber(fields.running_requests) or 0
    local assigned = ARGV[2] .. ARGV[i]
    local buckets = redis.call("HGETALL", assigned)
    for j = 1, #buckets, 2 do
      if (buckets[j] + 1) * bucket_ms > reported - tonumber(ARGV[3]) then
        tokens = tokens + buckets[j + 1]
      else
        redis.call("HDEL", assigned, buckets[j])
      end
    end
    if tokens < best_tokens or (tokens == best_tokens and running < best_running) then
      best, best_tokens, best_running = ARGV[i], tokens, running
    end
  end
end
if best == "" then
  return ""
end
local bucket = string.format("%.0f", math.floor(now / bucket_ms))
local assigned = ARGV[2] .. best
-- The same leg given to the same worker again replaces what it cost before.
local former = redis.call("HGET", KEYS[2], best)
if former then
  local former_bucket, former_tokens = string.match(former, "^%S+ (%d+) (%d+)$")
  if former_bucket and redis.call("HEXISTS", assigned, former_bucket) == 1 then
    redis.call("HINCRBY", assigned, former_bucket, -former_tokens)
  end
end
redis.call("HINCRBY", assigned, bucket, ARGV[7])
redis.call("PEXPIRE", assigned, ARGV[5])
redis.call("HSET", KEYS[2], best, ARGV[6] .. " " .. bucket .. " " .. ARGV[7])
redis.call("PEXPIRE", KEYS[2], ARGV[5])
return best
