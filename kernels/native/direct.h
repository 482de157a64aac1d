// A key tile and a few rows: keys and values meet the rows as they lie in the pool.
//
// Packing a tile pays when many rows share it. With a few it costs more than their products: what it
// would have stored stays in registers here, keys transposed and values woven. All sums are those of
// `Attention::add`, term by term: the arithmetic of a query does not tell how many came with it. AMX
// reads its operands from memory, and has them packed always.

#pragma once

#include "attention.h"

namespace {

// Rows that are done directly: registers have room for their sums.
template <class T> constexpr int FEW = sizeof(T) == 2 && ROW_STEP == 32 ? 0 : ROWS < 8 ? ROWS : 8;

template <class T, class Ahead> struct Direct {
    const Packer<T, Ahead> &packer;
    const Attention<T> &attention;
    static constexpr int SIDE = 16;  // keys whose values are mixed at a time
    // Turns of the look-ahead after so many keys: none is between sums that registers hold.
    static constexpr int SCORE_STEPS = 2, MIX_STEPS = 4;
    static constexpr int STEP = 4 / sizeof(T);  // elements of depth in one word

    void add(const T *q, const Keys &keys) const { few<FEW<T>>(q, keys); }

  private:
    template <int R> void few(const T *q, const Keys &keys) const {
        if constexpr (R > 1)
            if (attention.rows < R) return few<R - 1>(q, keys);
        if constexpr (R > 0) {
            packer.find(keys);
            for (int first = 0; first < keys.used; first += 2 * W) score<R>(q, first);
            attention.soften(0, keys);
            // Two column tiles at a time where registers have room for their sums.
            constexpr int AT_ONCE = R * 2 * TILE / W + 2 * TILE / W + 2 <= REGISTERS ? 2 : 1;
            for (int first = 0; first < keys.used; first += SIDE) {
                const T *from[SIDE];
                for (int at = 0; at < SIDE; ++at)
                    from[at] = packer.padded_row(first + at, packer.to_values, at);
                int d = 0;
                for (; d + AT_ONCE * TILE <= packer.wide; d += AT_ONCE * TILE)
                    mix<R, AT_ONCE>(d, from, first);
                for (; d < packer.wide; d += TILE) mix<R, 1>(d, from, first);
                for (int n = 0; n < MIX_STEPS; ++n) packer.lookahead.step();
            }
        }
    }

    // Of two times W keys from the tile's place `first` on, by turns: so no sum waits for itself.
    template <int R>
    inline __attribute__((always_inline)) void score(const T *q, int first) const {
        const int words = packer.wide * sizeof(T) / 4;
        const T *from[2 * W], *query[R];
        for (int at = 0; at < 2 * W; ++at) from[at] = packer.padded_row(first + at, 0, at);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) query[r] = q + r * packer.wide;
        for (int word = 0; word < words; word += W)
            for (int side = 0; side < 2 * W; side += W) {
                float *const out = attention.scores_of(0) + first + side;
                vf sum[R] = {};
                if (word)
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) sum[r] = load(out + r * KEY_TILE);
                vu rows[W];
#pragma GCC unroll 16
                for (int at = 0; at < W; ++at)
                    rows[at] = load_as<vu>(from[side + at] + word * STEP);
                transpose(rows);
#pragma GCC unroll 16
                for (int at = 0; at < W; ++at)
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r)
                        sum[r] = dot_once(sum[r], query[r] + (word + at) * STEP, rows[at]);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) store(out + r * KEY_TILE, sum[r]);
                for (int n = 0; n < SCORE_STEPS; ++n) packer.lookahead.step();
            }
    }

    // `TILES` column tiles from dimension `d` on: in the order of woven values, as after `add`.
    template <int R, int TILES>
    inline __attribute__((always_inline)) void mix(int d, const T *const *from, int first) const {
        constexpr int VECTORS = TILE_VECTORS;
        float *const out = attention.work.mix + d;
        vf sum[R][TILES * VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < TILES * VECTORS; ++v)
                sum[r][v] = load(out + r * packer.wide + v * W);
        for (int key = 0; key < SIDE; key += STEP) {
            const T *one = from[key] + d, *other = from[key + STEP - 1] + d;
#pragma GCC unroll 16
            for (int t = 0; t < TILES; ++t) {
                vu word[VECTORS];
                woven(one + t * TILE, other + t * TILE, word);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const T *weight = attention.weights_of(r) + first + key;
#pragma GCC unroll 16
                    for (int v = 0; v < VECTORS; ++v)
                        sum[r][t * VECTORS + v] = dot(sum[r][t * VECTORS + v], weight, word[v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < TILES * VECTORS; ++v)
                store(out + r * packer.wide + v * W, sum[r][v]);
    }
};

template <class T, class Ahead>
inline void attend(const kvr::Job &job, int layer, const kvr::AttentionItem &item, int first_token,
                   const Workspace<T> &work, Ahead &lookahead) {
    const kvr_config &c = job.c;
    const int dim = c.head_dim, wide = padded(dim), group = c.heads / c.kv_heads;
    const int rows = item.count * group, start = job.a.starts[item.row] + item.first;
    const int token = first_token + item.first, end = start + item.count;
    const int seen = kvr::first_seen(c.window, start);
    const T *q = static_cast<const T *>(job.s.q) +
                 (int64_t(item.head) * job.a.tokens + token) * group * wide;
    const Packer<T, Ahead> packer{job, layer, item.head, item.row, dim, wide, work, lookahead};
    const Attention<T> a{job, dim, wide, start, rows, group, work};
    const Direct<T, Ahead> direct{packer, a};
    a.begin();
    for (int at = seen / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE) {
        const int high = end < at + KEY_TILE ? end : at + KEY_TILE;
        const Keys keys{at, seen > at ? seen : at, high, padded(high - at)};
        if (item.shared) {
            const T *tile = packed_at<T>(job, item.place + at / KEY_TILE);
            a.add(q, keys, tile, tile + KEY_TILE * wide);
        } else if (rows <= FEW<T>) {
            direct.add(q, keys);
        } else {
            packer.pack(keys, work.keys, work.values);
            a.add(q, keys, work.keys, work.values);
        }
    }
    const ptrdiff_t stride = padded(c.heads * dim);
    for (int r = 0; r < rows; ++r) {
        float *mix = work.mix + r * wide;
        const float share = 1.0f / sum_of_lanes(load(work.total + r * W));
        for (int d = 0; d < wide; d += TILE) unweave<T>(mix + d);
        for (int d = 0; d < wide; d += W) store(mix + d, counting(load(mix + d)) * share);
        const int head = item.head * group + r % group;
        copy_as(static_cast<T *>(job.s.mix) + (token + r / group) * stride + head * dim, mix, dim);
    }
}

}  // namespace
