-- Writes a batch of ledger events, each only if it moves its request forward, and keeps the index
-- of what is open.
-- KEYS: 1 index of the routers with open records, 2 this router's open records,
--       3... the request of each event
-- ARGV: 1 router, 2 ttl ms, 3 rank from which a phase is final, then 9 per event:
--       phase, rank, attempt, prefill, decode, prompt tokens, output tokens, nonce, leg
-- Returns the number of events refused: another router's request, an ended one, or a move back.
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local final = tonumber(ARGV[3])
local refused = 0
for i = 3, #KEYS do
  local key, at = KEYS[i], 4 + (i - 3) * 9
  local rank, attempt = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local known = redis.pcall("HMGET", key, "router", "rank", "attempt", "phase")
  if known.err then
    -- Not a hash, so not a record: it must not hold up all that is to be written after it.
    redis.call("DEL", key)
    known = {}
  end
  local owner, known_rank, known_attempt, known_phase = known[1], known[2], known[3], known[4]
  local legal = true
  if type(owner) == "string" then
    local from, before = tonumber(known_rank) or 0, tonumber(known_attempt) or 0
    local forward = attempt > before or (attempt == before and rank >= from)
    -- Another router closed it because this one seemed to be gone; this one says that it is not.
    local here_after_all = known_phase == "swept" and attempt >= before
    local ended = from >= final
    -- An event that was written but whose answer was lost comes again: not a move, not a fault.
    local again = attempt == before and rank == from
    legal = owner == ARGV[1] and (again or here_after_all or (forward and not ended))
  end
  if legal then
    redis.call("HSET", key, "router", ARGV[1], "phase", ARGV[at], "rank", rank, "attempt", attempt,
      "prefill", ARGV[at + 3], "decode", ARGV[at + 4], "prompt_tokens", ARGV[at + 5],
      "output_tokens", ARGV[at + 6], "nonce", ARGV[at + 7], "updated_ms", now)
    redis.call("HDEL", key, "swept_by")
    redis.call("PEXPIRE", key, ARGV[2])
    if rank < final then
      redis.call("ZADD", KEYS[2], now, ARGV[at + 8])
    else
      redis.call("ZREM", KEYS[2], ARGV[at + 8])
    end
  else
    refused = refused + 1
  end
end
-- A record that was not written again has expired, and its place in the index with it.
redis.call("ZREMRANGEBYSCORE", KEYS[2], "-inf", "(" .. now - ARGV[2])
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", "(" .. now - ARGV[2])
if redis.call("ZCARD", KEYS[2]) > 0 then
  redis.call("ZADD", KEYS[1], now, ARGV[1])
  redis.call("PEXPIRE", KEYS[1], ARGV[2])
  redis.call("PEXPIRE", KEYS[2], ARGV[2])
else
  redis.call("ZREM", KEYS[1], ARGV[1])
end
return refused
