// Causal attention of one query tile over a request's blocks, with an online softmax.
//
//   keys of the request, tiles of KEY_TILE from position 0:   |0 ... 127|128 ... 255|256 ...
//
// Tiles do not depend on where a chunk begins, and a query that sees nothing of a tile skips it: so
// a query's arithmetic is the same alone and among others. Keys and values of a tile are packed
// as `tile` wants its weights; places of no key hold zeros there, and weights of hidden keys are 0.
// Weights are rounded to the dtype of the pool before they meet the values, as products take them.

#pragma once

#include "rows.h"
#include "tile.h"

namespace {

using kvr::KEY_TILE;

// One member's memory; the layout for T = float has room for bf16 too.
template <class T> struct Workspace {
    float *scores;   // [rows, KEY_TILE]
    T *weights;      // [rows, KEY_TILE]
    float *mix;      // [rows, D]
    float *part;     // [rows, 32]
    float *top, *total, *shrink;  // [rows]
    T *keys;         // [KEY_TILE / 16] panels of depth D
    T *values;       // [D / 16] panels of depth KEY_TILE
    const T **places;  // [KEY_TILE] see `find`
    T *spare;        // [17, D]: padded copies of rows, and a row of zeros

    Workspace(char *at, int rows, int dim) {
        auto carve = [&at](auto *&field, size_t count) {
            field = reinterpret_cast<decltype(+field)>(at);
            at += (count * sizeof *field + 63) / 64 * 64;
        };
        carve(scores, size_t(rows) * KEY_TILE);
        carve(weights, size_t(rows) * KEY_TILE);
        carve(mix, size_t(rows) * dim);
        carve(part, size_t(rows) * TILE);
        carve(top, rows);
        carve(total, rows);
        carve(shrink, rows);
        carve(keys, size_t(KEY_TILE) * dim);
        carve(values, size_t(KEY_TILE) * dim);
        carve(places, KEY_TILE);
        carve(spare, size_t(17) * dim);
    }
};

// The part [low, high) of the key tile at `start`, and how much of the tile is computed.
struct Keys {
    int start, low, high, used;
};

template <class T> struct Attention {
    const kvr::Job &job;
    const int layer, head, row, dim, wide;  // wide: dim, padded
    const Workspace<T> &work;
    const ptrdiff_t to_values = ptrdiff_t(job.c.kv_heads) * job.c.block_size * dim;

    // Where the tile's keys are; null where there is none. Values lie at one distance from them.
    // All of it is asked for at once, as blocks lie anywhere: packing then seldom waits for memory.
    void find(const Keys &keys) const {
        const int32_t *table = job.a.tables + job.a.table_offsets[row];
        const int size = job.c.block_size;
        for (int at = 0; at < keys.used; ++at) work.places[at] = nullptr;
        for (int position = keys.low; position < keys.high;) {
            const int place = position % size;
            const int left = keys.high - position;
            const int count = left < size - place ? left : size - place;
            const T *from =
                pool_row<T>(job, layer, 0, int64_t(table[position / size]) * size + place, head);
            for (const char *line = reinterpret_cast<const char *>(from);
                 line < reinterpret_cast<const char *>(from + count * dim); line += 64) {
                __builtin_prefetch(line);
                __builtin_prefetch(line + to_values * sizeof(T));
            }
            for (int at = 0; at < count; ++at, from += dim)
                work.places[position++ - keys.start] = from;
        }
    }

    // A row readable to the padded width: itself, a padded copy, or zeros where there is none.
    const T *padded_row(int at, ptrdiff_t distance, int copy) const {
        const T *from = work.places[at];
        if (!from) return work.spare + 16 * wide;
        if (dim == wide) return from + distance;
        std::memcpy(work.spare + copy * wide, from + distance, dim * sizeof(T));
        return work.spare + copy * wide;
    }

    void pack_keys(const Keys &keys) const {
        const int words = wide * sizeof(T) / 4;
        for (int first = 0; first < keys.used; first += W) {
            const T *from[W];
            for (int at = 0; at < W; ++at)
                from[at] = padded_row(first + at, 0, at);
            uint32_t *to = reinterpret_cast<uint32_t *>(work.keys) +
                           ptrdiff_t(first / PANEL) * words * PANEL + first % PANEL;
            for (int word = 0; word < words; word += W) {
                vu rows[W];
#pragma GCC unroll 16
                for (int at = 0; at < W; ++at)
                    rows[at] = load_as<vu>(reinterpret_cast<const uint32_t *>(from[at]) + word);
                transpose(rows);
#pragma GCC unroll 16
                for (int at = 0; at < W; ++at) store_as(to + (word + at) * PANEL, rows[at]);
            }
        }
    }

    void pack_values(const Keys &keys) const {
        constexpr int STEP = 4 / sizeof(T);
        for (int first = 0; first < keys.used; first += STEP) {
            const T *from[2] = {padded_row(first, to_values, 0), nullptr};
            if constexpr (STEP == 2) from[1] = padded_row(first + 1, to_values, 1);
            T *to = work.values + first * PANEL;
            for (int d = 0; d < wide; d += W) {
                T *at = to + d / PANEL * (KEY_TILE * PANEL) + d % PANEL * STEP;
                if constexpr (STEP == 2)
                    store_as(at, widen(load_as<vh>(from[0] + d)) |
                                     (widen(load_as<vh>(from[1] + d)) << 16));
                else
                    store_as(at, load_as<vf>(from[0] + d));
            }
        }
    }

    // Scores of row r become weights; the sums so far are to shrink to the new top.
    void soften(int r, int position, const Keys &keys, float scale) const {
        const int window = job.c.window;
        const int sees = window ? position - window + 1 : 0;
        const int low = sees > keys.start ? sees : keys.start;
        float *scores = work.scores + r * KEY_TILE;
        if (low >= keys.start + keys.used || position < keys.start) {
            work.shrink[r] = -1.0f;  // sees nothing of this tile
            return;
        }
        vi lane;
        for (int at = 0; at < W; ++at) lane[at] = at;
        const vi first = lane + keys.start;
        const vf hidden = splat(-__builtin_inff());
        vf most = hidden;
        for (int at = 0; at < keys.used; at += W) {
            const vi key = first + at;
            vf score = load(scores + at) * scale;
            score = (key >= low) & (key <= position) ? score : hidden;
            store(scores + at, score);
            most = score > most ? score : most;
        }
        const float tile_top = largest_lane(most);
        const float top = work.top[r] > tile_top ? work.top[r] : tile_top;
        work.shrink[r] = exp2(splat(work.top[r] - top))[0];
        work.top[r] = top;
        vf sum = {};
        for (int at = 0; at < keys.used; at += W) {
            const vf weight = exp2(load(scores + at) - top);
            store(work.weights + r * KEY_TILE + at, weight);
            sum += weight;
        }
        work.total[r] = work.total[r] * work.shrink[r] + sum_of_lanes(sum);
    }

    void add_values(int rows, int used) const {
        for (int d = 0; d < wide; d += TILE) {
            const Packed values{work.values + ptrdiff_t(d) * KEY_TILE, KEY_TILE * PANEL, used};
            tile(work.weights, KEY_TILE, rows, values, work.part, TILE);
            for (int r = 0; r < rows; ++r) {
                const float shrink = work.shrink[r];
                if (shrink < 0.0f) continue;
                float *mix = work.mix + r * wide + d;
                for (int at = 0; at < TILE; at += W)
                    store(mix + at,
                          fma(load(mix + at), splat(shrink), load(work.part + r * TILE + at)));
            }
        }
    }
};

template <class T>
inline void attend(const kvr::Job &job, int layer, const kvr::AttentionItem &item, int first_token,
                   const Workspace<T> &work) {
    const kvr_config &c = job.c;
    const int dim = c.head_dim, wide = padded(dim), group = c.heads / c.kv_heads;
    const int rows = item.count * group, start = job.a.starts[item.row] + item.first;
    const int token = first_token + item.first, end = start + item.count;
    const T *q = static_cast<const T *>(job.s.q) +
                 (int64_t(item.head) * job.a.tokens + token) * group * wide;
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // weights are powers of two
    const Attention<T> a{job, layer, item.head, item.row, dim, wide, work};
    for (int r = 0; r < rows; ++r) {
        work.top[r] = -__builtin_inff();
        work.total[r] = 0.0f;
    }
    std::memset(work.mix, 0, size_t(rows) * wide * sizeof(float));
    std::memset(work.spare, 0, size_t(17) * wide * sizeof(T));
    const int seen = c.window && start - c.window + 1 > 0 ? start - c.window + 1 : 0;
    for (int at = seen / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE) {
        const int high = end < at + KEY_TILE ? end : at + KEY_TILE;
        const Keys keys{at, seen > at ? seen : at, high, padded(high - at)};
        a.find(keys);
        a.pack_keys(keys);
        a.pack_values(keys);
        const ptrdiff_t panel = ptrdiff_t(wide) * PANEL;
        for (int key = 0; key < keys.used; key += TILE)
            tile(q, wide, rows, Packed{work.keys + key / PANEL * panel, panel, wide},
                 work.scores + key, KEY_TILE);
        for (int r = 0; r < rows; ++r) a.soften(r, start + r / group, keys, scale);
        a.add_values(rows, keys.used);
    }
    const ptrdiff_t stride = padded(c.heads * dim);
    for (int r = 0; r < rows; ++r) {
        float *mix = work.mix + r * wide;
        for (int d = 0; d < wide; d += W) store(mix + d, load(mix + d) / work.total[r]);
        const int head = item.head * group + r % group;
        copy_as(static_cast<T *>(job.s.mix) + (token + r / group) * stride + head * dim, mix, dim);
    }
}

}  // namespace
