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
using kvr::QUERY_ROWS;

// One member's memory; the layout for T = float has room for bf16 too.
template <class T> struct Workspace {
    float *scores[2];  // [QUERY_ROWS, KEY_TILE] of one group of rows, and of the next
    T *weights[2];     // [QUERY_ROWS, KEY_TILE]
    float *part;       // [QUERY_ROWS, D]
    float *mix;        // [rows, D]
    float *total;      // [rows, W]
    float *top, *shrink;  // [rows]
    T *keys;           // [KEY_TILE / 16] panels of depth D
    T *values;         // [D / 16] panels of depth KEY_TILE
    const T **places;  // [KEY_TILE] see `find`
    T *spare;          // [17, D]: padded copies of rows, and a row of zeros

    Workspace(char *at, int rows, int dim) {
        auto carve = [&at](auto *&field, size_t count) {
            field = reinterpret_cast<decltype(+field)>(at);
            at += (count * sizeof *field + 63) / 64 * 64;
        };
        for (float *&of : scores) carve(of, size_t(QUERY_ROWS) * KEY_TILE);
        for (T *&of : weights) carve(of, size_t(QUERY_ROWS) * KEY_TILE);
        carve(part, size_t(QUERY_ROWS) * dim);
        carve(mix, size_t(rows) * dim);
        carve(total, size_t(rows) * W);
        carve(top, rows);
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
    const int start, rows, heads;  // rows: queries from position `start` on, of `heads` heads each
    const Workspace<T> &work;
    static constexpr int PARTS = KEY_TILE / TILE;
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // weights are powers of two
    const ptrdiff_t to_values = ptrdiff_t(job.c.kv_heads) * job.c.block_size * dim;

    // Asks for the keys and values at once, as blocks lie anywhere: packing then seldom waits.
    // Always inline: a call of a function that only asks is dropped by the compiler.
    inline __attribute__((always_inline)) void fetch(int low, int high) const {
        const int32_t *table = job.a.tables + job.a.table_offsets[row];
        const int size = job.c.block_size;
        for (int position = low; position < high;) {
            const int place = position % size, left = high - position;
            const int count = left < size - place ? left : size - place;
            const T *from =
                pool_row<T>(job, layer, 0, int64_t(table[position / size]) * size + place, head);
            for (const char *line = reinterpret_cast<const char *>(from);
                 line < reinterpret_cast<const char *>(from + count * dim); line += 64) {
                __builtin_prefetch(line);
                __builtin_prefetch(line + to_values * sizeof(T));
            }
            position += count;
        }
    }

    // Where the tile's keys are; null where there is none. Values lie at one distance from them.
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

    // Whether a query at `position` sees all places of the tile, and the tile is full.
    bool sees_all(int position, const Keys &keys) const {
        const int window = job.c.window;
        return keys.used == KEY_TILE && keys.low == keys.start &&
               position >= keys.start + KEY_TILE - 1 &&
               (!window || position - window < keys.start);
    }

    // Scores of a row become weights; the row's sums so far are to shrink to the new top.
    void soften(int r, int position, const float *scores, T *weights, const Keys &keys) const {
        const int window = job.c.window;
        const int sees = window ? position - window + 1 : 0;
        if (sees_all(position, keys)) {
            vf score[KEY_TILE / W];
#pragma GCC unroll 8
            for (int v = 0; v < KEY_TILE / W; ++v) score[v] = load(scores + v * W);
            weigh<KEY_TILE / W>(r, score, KEY_TILE / W, weights);
            return;
        }
        const int low = sees > keys.start ? sees : keys.start;
        if (low >= keys.start + keys.used || position < keys.start) {
            work.shrink[r] = -1.0f;  // sees nothing of this tile
            return;
        }
        vi lane;
        for (int at = 0; at < W; ++at) lane[at] = at;
        vf score[KEY_TILE / W];
        for (int v = 0; v < keys.used / W; ++v) {
            const vi key = lane + (keys.start + v * W);
            score[v] = (key >= low) & (key <= position) ? load(scores + v * W)
                                                        : splat(-__builtin_inff());
        }
        weigh<0>(r, score, keys.used / W, weights);
    }

    // One order of sums, whatever is known of the count when it is compiled.
    template <int KNOWN>
    inline __attribute__((always_inline)) void weigh(int r, vf *score, int count,
                                                     T *weights) const {
        if (KNOWN) count = KNOWN;
        vf most = score[0];
#pragma GCC unroll 8
        for (int v = 1; v < count; ++v) most = score[v] > most ? score[v] : most;
        const float tile_top = largest_lane(most);
        const float top = work.top[r] > tile_top ? work.top[r] : tile_top;
        const vf unit = splat(scale), offset = splat(-top * scale);
        const vf shrink = exp2_for(T{}, splat((work.top[r] - top) * scale));
        work.shrink[r] = shrink[0];
        work.top[r] = top;
        vf sum = load(work.total + r * W) * shrink;
#pragma GCC unroll 8
        for (int v = 0; v < count; ++v) {
            const vf weight = exp2_for(T{}, fma(score[v], unit, offset));
            store(weights + v * W, weight);
            sum += weight;
        }
        store(work.total + r * W, sum);
    }

    // Scores of a group of rows with the keys of column tile `part` of the key tile.
    void score(const T *q, int group, int part, const Keys &keys) const {
        const int key = part * TILE, panel = wide * PANEL;
        if (key >= keys.used) return;
        tile(q + group * QUERY_ROWS * wide, wide, rows_of(group),
             Packed{work.keys + key / PANEL * panel, panel, wide}, work.scores[group % 2] + key,
             KEY_TILE);
    }

    // Part `part` of a group's rows.
    void soften(int group, int part, const Keys &keys) const {
        const int rows = rows_of(group), each = QUERY_ROWS / PARTS, end = (part + 1) * each;
        for (int r = part * each; r < end && r < rows; ++r) {
            const int row = group * QUERY_ROWS + r;
            soften(row, start + row / heads, work.scores[group % 2] + r * KEY_TILE,
                   work.weights[group % 2] + r * KEY_TILE, keys);
        }
    }

    // Values as a group's rows weigh them: every PARTS-th column tile from `part` on.
    void weigh_values(int group, int part, int used) const {
        for (int d = part * TILE; d < wide; d += PARTS * TILE) {
            const Packed values{work.values + ptrdiff_t(d) * KEY_TILE, KEY_TILE * PANEL, used};
            tile(work.weights[group % 2], KEY_TILE, rows_of(group), values, work.part + d, wide);
        }
    }

    void add_values(int group) const {
        for (int r = 0; r < rows_of(group); ++r) {
            const int row = group * QUERY_ROWS + r;
            const float shrink = work.shrink[row];
            if (shrink < 0.0f) continue;
            float *mix = work.mix + row * wide;
            const float *part = work.part + r * wide;
            for (int d = 0; d < wide; d += W)
                store(mix + d, fma(load(mix + d), splat(shrink), load(part + d)));
        }
    }

    // One key tile. What AMX does for the groups before and after runs beside a group's softmax,
    // and nothing is loaded as soon as it was stored.
    void add(const T *q, const Keys &keys) const {
        const int groups = (rows + QUERY_ROWS - 1) / QUERY_ROWS;
        for (int part = 0; part < PARTS; ++part) score(q, 0, part, keys);
        for (int group = 0; group <= groups; ++group) {
            for (int part = 0; part < PARTS; ++part) {
                if (group + 1 < groups) score(q, group + 1, part, keys);
                if (group > 0) weigh_values(group - 1, part, keys.used);
                if (group < groups) soften(group, part, keys);
            }
            if (group > 0) add_values(group - 1);
        }
    }

    int rows_of(int group) const {
        const int left = rows - group * QUERY_ROWS;
        return left < QUERY_ROWS ? left : QUERY_ROWS;
    }
};

// The first position of the key tile that the item begins with.
inline int first_key(const kvr::Job &job, const kvr::AttentionItem &item) {
    const int sees = job.a.starts[item.row] + item.first - job.c.window + 1;
    return job.c.window && sees > 0 ? sees : 0;
}

// The item comes next: its first keys are on their way meanwhile.
template <class T>
inline __attribute__((always_inline)) void expect(const kvr::Job &job, int layer,
                                                  const kvr::AttentionItem &item,
                                                  const Workspace<T> &work) {
    const int dim = job.c.head_dim, low = first_key(job, item);
    const int known = job.a.starts[item.row], end = low / KEY_TILE * KEY_TILE + KEY_TILE;
    const Attention<T> a{job, layer, item.head, item.row, dim, padded(dim), 0, 0, 0, work};
    a.fetch(low, known < end ? known : end);
}

template <class T>
inline void attend(const kvr::Job &job, int layer, const kvr::AttentionItem &item, int first_token,
                   const Workspace<T> &work) {
    const kvr_config &c = job.c;
    const int dim = c.head_dim, wide = padded(dim), group = c.heads / c.kv_heads;
    const int rows = item.count * group, start = job.a.starts[item.row] + item.first;
    const int token = first_token + item.first, end = start + item.count;
    const T *q = static_cast<const T *>(job.s.q) +
                 (int64_t(item.head) * job.a.tokens + token) * group * wide;
    const Attention<T> a{job, layer, item.head, item.row, dim, wide, start, rows, group, work};
    for (int r = 0; r < rows; ++r) work.top[r] = -__builtin_inff();
    std::memset(work.total, 0, size_t(rows) * W * sizeof(float));
    std::memset(work.mix, 0, size_t(rows) * wide * sizeof(float));
    std::memset(work.spare, 0, size_t(17) * wide * sizeof(T));
    const int seen = first_key(job, item);
    const int first_end = seen / KEY_TILE * KEY_TILE + KEY_TILE;
    a.fetch(seen, end < first_end ? end : first_end);
    for (int at = seen / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE) {
        const int high = end < at + KEY_TILE ? end : at + KEY_TILE;
        const Keys keys{at, seen > at ? seen : at, high, padded(high - at)};
        a.find(keys);
        a.pack_keys(keys);
        a.pack_values(keys);
        if (high < end) a.fetch(high, end < high + KEY_TILE ? end : high + KEY_TILE);
        a.add(q, keys);
    }
    const ptrdiff_t stride = padded(c.heads * dim);
    for (int r = 0; r < rows; ++r) {
        float *mix = work.mix + r * wide;
        const float share = 1.0f / sum_of_lanes(load(work.total + r * W));
        for (int d = 0; d < wide; d += W) store(mix + d, load(mix + d) * share);
        const int head = item.head * group + r % group;
        copy_as(static_cast<T *>(job.s.mix) + (token + r / group) * stride + head * dim, mix, dim);
    }
}

}  // namespace
