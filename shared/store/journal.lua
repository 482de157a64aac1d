-- Writes a batch of ledger events, each only if it moves its request forward.
-- KEYS: the request of each event
-- ARGV: 1 router, 2 ttl ms, 3 rank from which a phase is final, then 7 per event:
--       phase, rank, attempt, prefill, decode, prompt tokens, output tokens
-- Returns the number of events refused: another router's request, an ended one, or a move back.
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local refused = 0
for i, key in ipairs(KEYS) do
  local at = 4 + (i - 1) * 7
  local rank, attempt = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local known = redis.pcall("HMGET", key, "router", "rank", "attempt")
  if known.err then
    -- Not a hash, so not a record: it must not hold up all that is to be written after it.
    redis.call("DEL", key)
    known = {}
  end
  local owner, known_rank, known_attempt = known[1], known[2], known[3]
  local legal = true
  if type(owner) == "string" then
    local from, before = tonumber(known_rank) or 0, tonumber(known_attempt) or 0
    local forward = attempt > before or (attempt == before and rank >= from)
    local ended = from >= tonumber(ARGV[3])
    -- An event that was written but whose answer was lost comes again: not a move, not a fault.
    local again = attempt == before and rank == from
    legal = owner == ARGV[1] and (again or (forward and not ended))
  end
  if legal then
    redis.call("HSET", key, "router", ARGV[1], "phase", ARGV[at], "rank", rank, "attempt", attempt,
      "prefill", ARGV[at + 3], "decode", ARGV[at + 4], "prompt_tokens", ARGV[at + 5],
      "output_tokens", ARGV[at + 6], "updated_ms", now)
    redis.call("PEXPIRE", key, ARGV[2])
  else
    refused = refused + 1
  end
end
return refused
