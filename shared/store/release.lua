-- Takes back what a leg still counts for; a second release of the same leg finds nothing.
-- KEYS: 1 the leg's assignments
-- ARGV: 1 prefix of assigned tokens, 2 router that assigned it
-- Returns the tokens taken back.
local tokens = 0
local assignments = redis.call("HGETALL", KEYS[1])
for i = 1, #assignments, 2 do
  local router, bucket, cost = string.match(assignments[i + 1], "^(%S+) (%d+) (%d+)$")
  if router == ARGV[2] then
    redis.call("HDEL", KEYS[1], assignments[i])
    local assigned = ARGV[1] .. assignments[i]
    if redis.call("HEXISTS", assigned, bucket) == 1 then
      redis.call("HINCRBY", assigned, bucket, -cost)
      tokens = tokens + cost
    end
  end
end
return tokens
