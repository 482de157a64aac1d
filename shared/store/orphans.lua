-- Open ledger records: those of routers without a lease, or all. Writes nothing but the index.
-- KEYS: 1 index of the routers with open records
-- ARGV: 1 prefix of leases, 2 prefix of indexes, 3 prefix of records, 4 ttl ms,
--       5 most records to answer with, 6 "gone" (routers without a lease only) or "all"
-- Returns {leg, router, "1" when it holds a lease else "0", phase, attempt, nonce, prefill, decode,
--          prompt tokens, output tokens, updated ms} per record.
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local most, found = tonumber(ARGV[5]), {}
for _, router in ipairs(redis.call("ZRANGE", KEYS[1], 0, -1)) do
  local here = redis.call("EXISTS", ARGV[1] .. router)
  if #found < most and (here == 0 or ARGV[6] == "all") then
    local index = ARGV[2] .. router
    redis.call("ZREMRANGEBYSCORE", index, "-inf", "(" .. now - ARGV[4])
    for _, leg in ipairs(redis.call("ZRANGE", index, 0, most - #found - 1)) do
      -- A key of another type answers with an error table: no record.
      local record = redis.pcall("HMGET", ARGV[3] .. leg, "phase", "attempt", "nonce", "prefill",
        "decode", "prompt_tokens", "output_tokens", "updated_ms")
      if record.err or not record[1] then
        redis.call("ZREM", index, leg)
      else
        local row = { leg, router, tostring(here) }
        for i = 1, 8 do
          row[i + 3] = record[i] or ""
        end
        found[#found + 1] = row
      end
    end
    if redis.call("ZCARD", index) == 0 then
      redis.call("ZREM", KEYS[1], router)
    end
  end
end
return found
