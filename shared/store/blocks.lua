-- Appends a batch to what a worker tells of its blocks; now and then all it holds goes with it.
-- KEYS: 1 the worker's record, 2 its blocks, 3 its events
-- ARGV: 1 seq, 2 kind: "append", "compact" (a snapshot goes with the batch, older ones go) or
--       "whole" (the snapshot alone, whatever was there), 3 added, 4 removed, 5 snapshot, 6 ttl ms
-- Returns 1 when written; 0 when the batch does not follow what is there, -1 when the worker has no
-- lease: then nothing was written.
if redis.call("EXISTS", KEYS[1]) == 0 then
  return -1
end
local seq, kind = ARGV[1], ARGV[2]
if kind == "whole" then
  redis.call("DEL", KEYS[2], KEYS[3])
elseif tonumber(redis.call("HGET", KEYS[2], "seq") or "0") ~= seq - 1
  or (seq ~= "1" and redis.call("EXISTS", KEYS[3]) == 0) then
  return 0
end
if kind == "whole" then
  redis.call("XADD", KEYS[3], seq .. "-0", "=", "")
else
  redis.call("XADD", KEYS[3], seq .. "-0", "+", ARGV[3], "-", ARGV[4])
end
redis.call("HSET", KEYS[2], "seq", seq)
if kind ~= "append" then
  redis.call("HSET", KEYS[2], "at", seq, "digests", ARGV[5])
  redis.call("XTRIM", KEYS[3], "MAXLEN", "1")
end
redis.call("PEXPIRE", KEYS[2], ARGV[6])
redis.call("PEXPIRE", KEYS[3], ARGV[6])
return 1
