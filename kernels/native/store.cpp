// Packs tensors, and checks and places the tokens of a step.

#include "store.h"

namespace kvr {

int32_t Model::set(int32_t slot, int32_t number, const void *values, int64_t rows,
                   int64_t columns) {
    if (number < 0 || number >= c.layers) return KVR_BAD_SHAPE;
    Layer &layer = layers[number];
    const int64_t q = int64_t(c.heads) * c.head_dim, kv = int64_t(c.kv_heads) * c.head_dim;
    const auto is = [&](int64_t r, int64_t k) { return rows == r && columns == k; };
    const auto vector = [&](float *to, int64_t width) -> int32_t {
        if (!is(1, width)) return KVR_BAD_SHAPE;
        std::memcpy(to, values, width * sizeof(float));
        return KVR_OK;
    };
    const auto some = [&](const Matrix &m, int64_t r, int64_t k, int64_t first = 0,
                          int alternate = -1) -> int32_t {
        int64_t &done = rows_set[number * KVR_ROPE + slot];
        if (columns != k || rows < 1 || rows > r - done) return KVR_BAD_SHAPE;
        pack(m, values, rows, columns, first + done, alternate);
        done = (done + rows) % r;  // a whole tensor may be set once more
        return KVR_OK;
    };
    switch (slot) {
    case KVR_EMBED: return some(embed, c.vocab, c.hidden);
    case KVR_HEAD: return c.tied ? int32_t(KVR_BAD_SHAPE) : some(head, c.vocab, c.hidden);
    case KVR_NORM: return vector(norm, c.hidden);
    case KVR_ATTENTION_NORM: return vector(layer.attention_norm, c.hidden);
    case KVR_MLP_NORM: return vector(layer.mlp_norm, c.hidden);
    case KVR_Q: return some(layer.qkv, q, c.hidden);
    case KVR_K: return some(layer.qkv, kv, c.hidden, q);
    case KVR_V: return some(layer.qkv, kv, c.hidden, q + kv);
    case KVR_Q_BIAS: return vector(layer.qkv_bias, q);
    case KVR_K_BIAS: return vector(layer.qkv_bias + q, kv);
    case KVR_V_BIAS: return vector(layer.qkv_bias + q + kv, kv);
    case KVR_Q_NORM: return vector(layer.q_norm, c.head_dim);
    case KVR_K_NORM: return vector(layer.k_norm, c.head_dim);
    case KVR_ATTENTION_OUT: return some(layer.attention_out, c.hidden, q);
    case KVR_GATE: return some(layer.gate_up, c.intermediate, c.hidden, 0, 0);
    case KVR_UP: return some(layer.gate_up, c.intermediate, c.hidden, 0, 1);
    case KVR_DOWN: return some(layer.down, c.hidden, c.intermediate);
    case KVR_ROPE:
        if (columns != c.head_dim) return KVR_BAD_SHAPE;
        rope = static_cast<const float *>(values);
        rope_positions = rows;
        return KVR_OK;
    default: return KVR_BAD_SHAPE;
    }
}

int32_t Model::check(const kvr_step_args &a) const {
    int64_t tokens = 0;
    for (int row = 0; row < a.rows; ++row) {
        const int64_t end = int64_t(a.starts[row]) + a.counts[row];
        if (a.starts[row] < 0 || a.counts[row] < 1 || end > rope_positions) return KVR_BAD_POSITION;
        for (int64_t at = 0; at * c.block_size < end; ++at) {
            const int32_t block = a.tables[a.table_offsets[row] + at];
            if (block < 0 || block >= a.pool_blocks) return KVR_BAD_BLOCK;
        }
        tokens += a.counts[row];
    }
    if (tokens != a.tokens) return KVR_BAD_POSITION;
    for (int t = 0; a.token_ids && t < a.tokens; ++t)
        if (a.token_ids[t] < 0 || a.token_ids[t] >= c.vocab) return KVR_BAD_TOKEN;
    for (int r = 0; r < a.wanted; ++r)
        if (a.wanted_at[r] < 0 || a.wanted_at[r] >= a.tokens) return KVR_BAD_POSITION;
    return KVR_OK;
}

// Places of all tokens, and who attends to what.
int32_t Model::plan(const kvr_step_args &a) {
    if (const int32_t status = check(a)) return status;
    if (!ensure_room(a.tokens > a.wanted ? a.tokens : a.wanted)) return KVR_NO_MEMORY;
    if (a.pool != seen_pool) {  // blocks of a request lie anywhere in it
        want_large_pages(a.pool, size_t(a.pool_blocks) * block_bytes());
        seen_pool = a.pool;
    }
    row_tokens.clear();
    int token = 0;
    for (int row = 0; row < a.rows; ++row) {
        row_tokens.push_back(token);
        for (int at = 0; at < a.counts[row]; ++at, ++token) {
            const int position = a.starts[row] + at;
            const int64_t block = a.tables[a.table_offsets[row] + position / c.block_size];
            scratch.position[token] = position;
            scratch.slot[token] = block * c.block_size + position % c.block_size;
        }
    }
    return ensure_places(share_attention(a)) ? KVR_OK : KVR_NO_MEMORY;
}

// Makes the items of a step, head by head, so that a head's keys and values stay in a cache; the
// late, long query tiles of a row come first. Returns the most places that a wave packs.
int64_t Model::share_attention(const kvr_step_args &a) {
    packs.clear();
    items.clear();
    waves.clear();
    int tile = MOST_QUERIES / group();  // positions; every member wants some
    const int64_t queries = int64_t(a.tokens) * c.kv_heads;
    while (tile > 16 && queries < int64_t(tile) * 3 * crew.members) tile /= 2;
    if (tile < 1) tile = 1;
    const int64_t most_places = SHARED_BYTES / place_bytes();
    int64_t places = 0, needed = 0;
    const auto end_wave = [&] {
        waves.push_back({int(packs.size()), int(items.size())});
        if (places > needed) needed = places;
        places = 0;
    };
    for (int row = 0; row < a.rows; ++row) {
        const int begin = first_seen(c.window, a.starts[row]), end = a.starts[row] + a.counts[row];
        const int from = begin / KEY_TILE, to = (end - 1) / KEY_TILE + 1;
        const bool shared = a.counts[row] > tile;
        for (int head = 0; head < c.kv_heads; ++head) {
            if (shared && places && places + to - from > most_places) end_wave();
            const int place = int(places) - from;
            for (int at = from; shared && at < to; ++at) {
                const int low = at * KEY_TILE, high = low + KEY_TILE;
                packs.push_back({row, head, begin > low ? begin : low, end < high ? end : high,
                                 place + at});
                ++places;
            }
            for (int first = (a.counts[row] - 1) / tile * tile; first >= 0; first -= tile) {
                const int left = a.counts[row] - first, count = left < tile ? left : tile;
                const int start = a.starts[row] + first;
                AttentionItem item{row, head, 0, 0, first, count, shared, place};
                if (!shared) item.begin = first_seen(c.window, start), item.end = start + count;
                items.push_back(item);
            }
        }
    }
    end_wave();
    return needed;
}

Job Model::job(const kvr_step_args &args) {
    Job j{};
    j.c = c;
    j.layers = layers.data();
    j.norm = norm;
    j.rope = rope;
    j.embed = embed;
    j.head = head;
    j.crew = args.alone ? &lone : &crew;
    j.s = scratch;
    j.a = args;
    j.row_tokens = row_tokens.data();
    j.packs = packs.data();
    j.pack_count = int(packs.size());
    j.items = items.data();
    j.item_count = int(items.size());
    j.waves = waves.data();
    j.wave_count = int(waves.size());
    j.s.packed = packed.at();
    j.one_item_each = j.item_count == args.rows * c.kv_heads;
    j.progress = &progress;
    j.times = times;
    return j;
}

}  // namespace kvr
