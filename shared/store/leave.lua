-- Ends a lease. The keys carry the owner's incarnation, so only its own entries can go.
-- KEYS: 1 the member's record, 2 the index of its kind, 3 its load, 4 its assigned tokens, 5 the cluster's version,
--       6... what else goes with it
-- ARGV: 1 incarnation, 2 index ttl ms
-- Returns 1 when the lease was still there, else 0.
redis.call("INCR", KEYS[5])
redis.call("PEXPIRE", KEYS[5], ARGV[2])
redis.call("ZREM", KEYS[2], ARGV[1])
redis.call("DEL", KEYS[3], KEYS[4], unpack(KEYS, 6))
return redis.call("DEL", KEYS[1])
