// Causal attention of one query tile over a request's blocks, with an online softmax.
//
//   keys of the request, tiles of KEY_TILE from position 0:   |0 ... 127|128 ... 255|256 ...
//
// Tiles do not depend on where a chunk begins, and a query that sees nothing of a tile skips it: so
// a query's arithmetic is the same alone and among others. Keys and values of a tile are packed
// as `tile` wants its weights; places of no key hold zeros there, and weights of hidden keys are 0.
// Weights are rounded to the dtype of the pool before they meet the values, as products take them.
//
// A group of rows is done with a tile before the next one begins, and its weights take the place of
// its scores: so all that a group touches stays in the nearest cache beside the tile. AMX and other
// arithmetic take turns, as neither gains beside the other: the processor has one place for both.

#pragma once

#include "rows.h"
#include "tile.h"

namespace {

using kvr::COPIED_KEYS;
using kvr::KEY_TILE;
using kvr::QUERY_ROWS;

// One member's memory; the layout for T = float has room for bf16 too.
template <class T> struct Workspace {
    float *scores;     // [QUERY_ROWS, KEY_TILE] of one group of rows; then weights, as T
    float *mix;        // [rows, D]
    float *total;      // [rows, W]
    float *top, *shrink;  // [rows]
    T *keys;           // [KEY_TILE / 16] panels of depth D
    T *values;         // [D / 16] panels of depth KEY_TILE
    const T **places;  // [KEY_TILE] see `find`
    T *spare;          // [COPIED_KEYS + 1, D]: padded with zeros; at last a row of zeros

    Workspace(char *at, int rows, int dim) {
        auto carve = [&at](auto *&field, size_t count) {
            field = reinterpret_cast<decltype(+field)>(at);
            at += (count * sizeof *field + 63) / 64 * 64;
        };
        carve(scores, size_t(QUERY_ROWS) * KEY_TILE);
        carve(mix, size_t(rows) * dim);
        carve(total, size_t(rows) * W);
        carve(top, rows);
        carve(shrink, rows);
        carve(keys, size_t(KEY_TILE) * dim);
        carve(values, size_t(KEY_TILE) * dim);
        carve(places, KEY_TILE);
        carve(spare, size_t(COPIED_KEYS + 1) * dim);
        std::memset(spare, 0, size_t(COPIED_KEYS + 1) * dim * sizeof *spare);
    }
};

// The part [low, high) of the key tile at `start`, and how much of the tile is computed.
struct Keys {
    int start, low, high, used;
};

// Asks for keys and values some way before they are packed, over the items that one member will
// likely do: as blocks lie anywhere, the processor cannot know what comes next. A few lines at a
// time between other work, because whoever asks for more than a core can await at once waits.
template <class T, class Item> class Lookahead {
  public:
    Lookahead(const kvr::Job &job, int layer, const Item *items, int count)
        : job_(job), items_(items), count_(count), layer_(layer),
          row_bytes_(job.c.head_dim * sizeof(T)),
          to_values_(ptrdiff_t(job.c.kv_heads) * job.c.block_size * row_bytes_) {}

    // The member has taken this item.
    void begin(int number) {
        if (number != likely_) {
            ahead_ = 0;
            open(number);
            for (int byte = 0; byte < DISTANCE; byte += STEP) step();
        }
        likely_ = number + 1;
    }

    // So many keys are being packed.
    void passed(int keys) { ahead_ -= keys * row_bytes_; }

    // Always inline: a call of a function that only asks is dropped by the compiler.
    inline __attribute__((always_inline)) void step() {
        if (ahead_ >= DISTANCE || (at_ == run_end_ && !next_run())) return;
#pragma GCC unroll 16
        for (int byte = 0; byte < STEP; byte += 64) {
            __builtin_prefetch(at_ + byte, 0, LOCALITY);
            __builtin_prefetch(at_ + to_values_ + byte, 0, LOCALITY);
        }
        const int left = int(run_end_ - at_), asked = left < STEP ? left : STEP;
        at_ += asked;
        ahead_ += asked;
    }

  private:
    // Bytes of keys, and as many of values. Without AMX, half as much asked into the first cache
    // instead of the second makes attention 10 to 30 % faster.
    static constexpr int DISTANCE = ROW_STEP == 32 ? 16384 : 14336;
    static constexpr int LOCALITY = ROW_STEP == 32 ? 2 : 3;  // the second cache, the first
    static constexpr int STEP = 256;

    void open(int number) {
        number_ = number;
        at_ = run_end_ = nullptr;
        if (number >= count_) return;
        position_ = items_[number].begin;
        end_ = items_[number].end;
    }

    // The rows of one block lie side by side. False: there are no more items.
    __attribute__((noinline)) bool next_run() {
        while (number_ < count_ && position_ == end_) open(number_ + 1);
        if (number_ >= count_) return false;
        const Item &item = items_[number_];
        const int size = job_.c.block_size, place = position_ % size, left = end_ - position_;
        const int count = left < size - place ? left : size - place;
        const int32_t *table = job_.a.tables + job_.a.table_offsets[item.row];
        const int64_t slot = int64_t(table[position_ / size]) * size + place;
        at_ = reinterpret_cast<const char *>(pool_row<T>(job_, layer_, 0, slot, item.head));
        run_end_ = at_ + count * row_bytes_;
        position_ += count;
        return true;
    }

    const kvr::Job &job_;
    const Item *items_;
    const int count_, layer_, row_bytes_;
    const ptrdiff_t to_values_;  // bytes
    int likely_ = -1;            // the item that the member takes next
    int number_ = 0, position_ = 0, end_ = 0;  // the item of the next run, where the run begins
    const char *at_ = nullptr, *run_end_ = nullptr;
    int ahead_ = 0;  // bytes of keys that were asked for and are not packed yet
};

// Packs keys and values of one request for one KV head.
template <class T, class Ahead> struct Packer {
    const kvr::Job &job;
    const int layer, head, row, dim, wide;  // wide: dim, padded
    const Workspace<T> &work;
    Ahead &lookahead;
    const ptrdiff_t to_values = ptrdiff_t(job.c.kv_heads) * job.c.block_size * dim;

    void pack(const Keys &keys, T *to_keys, T *to_values) const {
        find(keys);
        for (int first = 0; first < keys.used; first += W) {
            pack_keys(first, to_keys);
            pack_values(first, to_values);
        }
    }

    // Where the tile's keys are; null where there is none. Values lie at one distance from them.
    void find(const Keys &keys) const {
        lookahead.passed(keys.high - keys.low);
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
    inline __attribute__((always_inline)) const T *padded_row(int at, ptrdiff_t distance,
                                                              int copy) const {
        const T *from = work.places[at];
        if (!from) return work.spare + COPIED_KEYS * wide;
        if (dim == wide) return from + distance;
        std::memcpy(work.spare + copy * wide, from + distance, dim * sizeof(T));
        return work.spare + copy * wide;
    }

  private:
    // W keys from the tile's place `first` on.
    void pack_keys(int first, T *keys) const {
        const int words = wide * sizeof(T) / 4;
        const T *from[W];
        for (int at = 0; at < W; ++at)
            from[at] = padded_row(first + at, 0, at);
        uint32_t *to = reinterpret_cast<uint32_t *>(keys) +
                       ptrdiff_t(first / PANEL) * words * PANEL + first % PANEL;
        for (int word = 0; word < words; word += W) {
            vu rows[W];
#pragma GCC unroll 16
            for (int at = 0; at < W; ++at)
                rows[at] = load_as<vu>(reinterpret_cast<const uint32_t *>(from[at]) + word);
            transpose(rows);
#pragma GCC unroll 16
            for (int at = 0; at < W; ++at) store_as(to + (word + at) * PANEL, rows[at]);
            lookahead.step();
        }
    }

    // Their values, woven: so `mix` has its dimensions in another order until the end.
    void pack_values(int first, T *values) const {
        constexpr int ROWS = 4 / sizeof(T);
        for (int at = first; at < first + W; at += ROWS) {
            const T *one = padded_row(at, to_values, 0), *other = one;
            if constexpr (ROWS == 2) other = padded_row(at + 1, to_values, 1);
            T *to = values + at * PANEL;
            for (int d = 0; d < wide; d += TILE)
                weave(one + d, other + d, to + ptrdiff_t(d) * KEY_TILE, KEY_TILE * PANEL);
            lookahead.step();
        }
    }
};

template <class T> struct Attention {
    const kvr::Job &job;
    const int dim, wide;  // wide: dim, padded
    const int start, rows, heads;  // rows: queries from position `start` on, of `heads` heads each
    const Workspace<T> &work;
    static constexpr int VECTORS = KEY_TILE / W;
    static constexpr int WEIGHTS = KEY_TILE * int(sizeof(float) / sizeof(T));  // row to row
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // weights are powers of two

    // Whether the tile's first place is not too far back for a query at `position`.
    bool sees_first(int position, const Keys &keys) const {
        const int window = job.c.window;
        return !window || position - window < keys.start;
    }

    void begin() const {
        for (int r = 0; r < rows; ++r) work.top[r] = -__builtin_inff();
        std::memset(work.total, 0, size_t(rows) * W * sizeof(float));
        std::memset(work.mix, 0, size_t(rows) * wide * sizeof(float));
    }

    float *scores_of(int r) const { return work.scores + r * KEY_TILE; }
    T *weights_of(int r) const { return reinterpret_cast<T *>(scores_of(r)); }

    // Scores of a group of rows become weights.
    void soften(int group, const Keys &keys) const {
        const int first = group * QUERY_ROWS, rows = rows_of(group);
        const int low = start + first / heads, high = start + (first + rows - 1) / heads;
        const bool whole = rows == QUERY_ROWS && keys.low == keys.start && sees_first(high, keys);
        if (whole && keys.used == KEY_TILE && low >= keys.start + KEY_TILE - 1)
            for (int r = 0; r < rows; r += W) soften_many<false>(first + r, r, keys);
        else if (whole && low >= keys.start)
            for (int r = 0; r < rows; r += W) soften_many<true>(first + r, r, keys);
        else
            for (int r = 0; r < rows; ++r)
                soften_one(first + r, r, start + (first + r) / heads, keys);
    }

    // W rows that see the whole tile or, with `CAUSAL`, from its first place up to their own: what
    // is one number per row is computed for all at once.
    template <bool CAUSAL> void soften_many(int row, int r, const Keys &keys) const {
        vi lane;
        for (int at = 0; at < W; ++at) lane[at] = at;
        const auto score_of = [&](int at, int v) {
            const vf score = load(scores_of(r + at) + v * W);
            if (!CAUSAL) return score;
            const int last = start + (row + at) / heads - keys.start - v * W;
            return lane <= last ? score : splat(-__builtin_inff());
        };
        vf most[W];
#pragma GCC unroll 16
        for (int at = 0; at < W; ++at) {
            most[at] = score_of(at, 0);
            for (int v = 1; v < VECTORS; ++v) most[at] = larger(score_of(at, v), most[at]);
        }
        const vf before = load(work.top + row), top = larger(before, largest_lanes(most));
        const vf shrink = exp2_for(T{}, (before - top) * scale);
        store(work.top + row, top);
        store(work.shrink + row, shrink);
        for (int at = 0; at < W; ++at) {
            vf score[VECTORS];
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) score[v] = score_of(at, v);
            weigh<VECTORS>(row + at, score, VECTORS, weights_of(r + at));
        }
    }

    void soften_one(int row, int r, int position, const Keys &keys) const {
        const int window = job.c.window, sees = window ? position - window + 1 : 0;
        const int low = sees > keys.start ? sees : keys.start, vectors = keys.used / W;
        if (low >= keys.start + keys.used || position < keys.start) {  // sees nothing of it
            std::memset(weights_of(r), 0, keys.used * sizeof(T));
            return;
        }
        vi lane;
        for (int at = 0; at < W; ++at) lane[at] = at;
        vf score[VECTORS], most = splat(-__builtin_inff());
        for (int v = 0; v < vectors; ++v) {
            const vi key = lane + (keys.start + v * W);
            score[v] = (key >= low) & (key <= position) ? load(scores_of(r) + v * W)
                                                        : splat(-__builtin_inff());
            most = larger(score[v], most);
        }
        const float before = work.top[row], tile_top = largest_lane(most);
        const float top = before > tile_top ? before : tile_top;
        work.top[row] = top;
        work.shrink[row] = exp2_for(T{}, splat((before - top) * scale))[0];
        weigh<0>(row, score, vectors, weights_of(r));
    }

    // One order of sums, whatever is known of the count when it is compiled.
    template <int KNOWN>
    inline __attribute__((always_inline)) void weigh(int row, const vf *score, int count,
                                                     T *weights) const {
        if (KNOWN) count = KNOWN;
        const float shrink = work.shrink[row];
        const vf unit = splat(scale), offset = splat(-work.top[row] * scale);
        vf sum = load(work.total + row * W) * shrink;
#pragma GCC unroll 16
        for (int v = 0; v < count; v += 2) {
            const vf one = exp2_for(T{}, fma(score[v], unit, offset));
            const vf other = exp2_for(T{}, fma(score[v + 1], unit, offset));
            store(weights + v * W, one, other);
            sum += one;
            sum += other;
        }
        store(work.total + row * W, sum);
        if (shrink == 1.0f) return;
        float *mix = work.mix + row * wide;
        for (int d = 0; d < wide; d += W) store(mix + d, load(mix + d) * shrink);
    }

    // One key tile.
    void add(const T *q, const Keys &keys, const T *key_tile, const T *value_tile) const {
        for (int group = 0; group * QUERY_ROWS < rows; ++group) {
            const int first = group * QUERY_ROWS, count = rows_of(group);
            int key = 0;
            for (; key + 2 * TILE <= keys.used; key += 2 * TILE)
                wide_tile(q + first * wide, wide, count,
                          Packed{key_tile + key * wide, wide * PANEL, wide}, work.scores + key,
                          KEY_TILE, false);
            for (; key < keys.used; key += TILE)
                tile(q + first * wide, wide, count,
                     Packed{key_tile + key * wide, wide * PANEL, wide}, work.scores + key,
                     KEY_TILE);
            soften(group, keys);
            int d = 0;
            for (; d + 2 * TILE <= wide; d += 2 * TILE)
                wide_tile(weights_of(0), WEIGHTS, count,
                          Packed{value_tile + ptrdiff_t(d) * KEY_TILE, KEY_TILE * PANEL, keys.used},
                          work.mix + first * wide + d, wide, true);
            for (; d < wide; d += TILE)
                tile(weights_of(0), WEIGHTS, count,
                     Packed{value_tile + ptrdiff_t(d) * KEY_TILE, KEY_TILE * PANEL, keys.used},
                     work.mix + first * wide + d, wide, {}, true);
        }
    }

    int rows_of(int group) const {
        const int left = rows - group * QUERY_ROWS;
        return left < QUERY_ROWS ? left : QUERY_ROWS;
    }
};

template <class T>
inline T *packed_at(const kvr::Job &job, int place) {
    return static_cast<T *>(job.s.packed) +
           int64_t(place) * 2 * KEY_TILE * padded(job.c.head_dim);
}

template <class T, class Ahead>
inline void pack_shared(const kvr::Job &job, int layer, const kvr::PackItem &item,
                        const Workspace<T> &work, Ahead &lookahead) {
    const int dim = job.c.head_dim, wide = padded(dim), start = item.begin / KEY_TILE * KEY_TILE;
    T *keys = packed_at<T>(job, item.place);
    Packer<T, Ahead>{job, layer, item.head, item.row, dim, wide, work, lookahead}.pack(
        {start, item.begin, item.end, padded(item.end - start)}, keys, keys + KEY_TILE * wide);
}

}  // namespace
