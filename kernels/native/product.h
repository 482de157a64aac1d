// x W^T by column tiles, with what follows it done while the tile is in the first cache.

#pragma once

#include "tile.h"

namespace {

enum class Then {
    STORE,  // out float = sum + bias
    ADD,    // out float += sum
    GATE,   // out T = silu(first panel) * second panel
};

struct Product {
    const void *a;
    ptrdiff_t lda;
    int rows;
    kvr::Matrix w;
    Then then;
    const float *bias;  // padded, or null
    void *out;
    ptrdiff_t ldo;
};

template <class T> constexpr bool BY_AMX = ROW_STEP == 32 && sizeof(T) == 2;
constexpr int ROW_BLOCK = 256;  // rows of one work item: their inputs stay in the second cache
// By AMX, sums of many rows are put away after so much of K: that much of a column tile stays in the
// first cache, also where two threads share one.
constexpr int DEPTH_BLOCK = 288;

template <class T> inline vf silu(vf x) {
    const float minus_log2_e = -1.44269504f;
    return quotient_for(T{}, x, exp2_for(T{}, x * minus_log2_e) + 1.0f);
}

template <class T> inline void finish(const Product &p, const float *sums, int row, int column) {
    if (p.then == Then::GATE) {
        T *out = static_cast<T *>(p.out) + row * p.ldo + column / 2;
        for (int at = 0; at < PANEL; at += W)
            store(out + at, silu<T>(load(sums + at)) * load(sums + PANEL + at));
        return;
    }
    float *out = static_cast<float *>(p.out) + row * p.ldo + column;
    const int columns = p.w.width - column < TILE ? p.w.width - column : TILE;
    const float *bias = p.bias ? p.bias + column : nullptr;
    if (columns < TILE) {
        for (int at = 0; at < columns; ++at)
            out[at] = sums[at] + (p.then == Then::ADD ? out[at] : bias ? bias[at] : 0.0f);
        return;
    }
    for (int at = 0; at < TILE; at += W) {
        vf other = p.then == Then::ADD ? load(out + at) : bias ? load(bias + at) : splat(0.0f);
        store(out + at, load(sums + at) + other);
    }
}

// Where a row's results go is asked for while sums are made: other members have read it since.
template <class T> inline __attribute__((always_inline)) void expect_row(const Product &p, int row,
                                                                         int column) {
    if (p.then == Then::GATE) {
        __builtin_prefetch(static_cast<T *>(p.out) + row * p.ldo + column / 2, 1);
        return;
    }
    const float *out = static_cast<const float *>(p.out) + row * p.ldo + column;
    __builtin_prefetch(out, 1);
    __builtin_prefetch(out + PANEL, 1);
}

// `next`: the column whose weights are asked for meanwhile, or -1.
template <class T>
inline void product_item(const Product &p, int column, int first, int rows, int next) {
    alignas(64) float sums[(ROW_BLOCK + ROW_STEP) * TILE];
    const T *a = static_cast<const T *>(p.a);
    const ptrdiff_t panel = ptrdiff_t(p.w.depth) * PANEL;
    const T *weights = static_cast<const T *>(p.w.data) + column / PANEL * panel;
    const int steps = (rows + ROW_STEP - 1) / ROW_STEP;
    const T *after = next < 0 ? nullptr : static_cast<const T *>(p.w.data) + next / PANEL * panel;
    const int block = BY_AMX<T> && rows > ROW_STEP ? DEPTH_BLOCK : p.w.depth;
    for (int k = 0; k < p.w.depth; k += block) {
        const int depth = p.w.depth - k < block ? p.w.depth - k : block;
        const Packed w{weights + ptrdiff_t(k) * PANEL, panel, depth};
        const bool last = k + depth == p.w.depth;
        Ahead<BY_AMX<T> ? 0 : 1> ahead;
        const T *soon = last ? after : first ? nullptr : weights + ptrdiff_t(k + block) * PANEL;
        if (soon) {
            ahead.at = reinterpret_cast<const char *>(soon);
            ahead.other = panel * sizeof(T);
            ahead.lines = BY_AMX<T> ? (16 + steps - 1) / steps : 1;
        }
        for (int row = 0; row < rows; row += ROW_STEP) {
            const int count = rows - row < ROW_STEP ? rows - row : ROW_STEP;
            for (int r = row; last && r < row + count; ++r) expect_row<T>(p, first + r, column);
            const T *from = a + (first + row) * p.lda + k;
            float *to = sums + row * TILE;
            if (ahead.lines)
                tile(from, p.lda, count, w, to, TILE, ahead, k > 0);
            else
                tile(from, p.lda, count, w, to, TILE, Nothing{}, k > 0);
            if (BY_AMX<T>)
                ahead.at += ahead.lines * (depth / 32) * 64;
            else
                ahead.lines = 0;
            for (int r = row; last && r < row + count; ++r)
                finish<T>(p, sums + r * TILE, first + r, column);
        }
    }
}

// A phase: all members call it with the same product. Of many rows, a member computes both column
// tiles whose gated results share a cache line. By vectors a block of rows is done with all columns
// before the next: 5 % faster from 1,024 rows on.
template <class T> inline void product(kvr::Crew &crew, int member, const Product &p) {
    const int tiles = (p.w.width + TILE - 1) / TILE, blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int span = p.then == Then::GATE && p.rows > kvr::FEW_ROWS ? 2 : 1;
    const int spans = (tiles + span - 1) / span;
    for (int item; (item = crew.take(member, spans * blocks)) >= 0;) {
        const int first = (BY_AMX<T> ? item % blocks : item / spans) * ROW_BLOCK;
        const int left = p.rows - first;
        const int rows = left < ROW_BLOCK ? left : ROW_BLOCK;
        const int begin = (BY_AMX<T> ? item / blocks : item % spans) * span;
        const int end = begin + span < tiles ? begin + span : tiles;
        for (int tile = begin; tile < end; ++tile) {
            const bool ends = (!BY_AMX<T> || first + rows == p.rows) && tile + 1 < tiles;
            const int next = ends ? (tile + 1) * TILE : -1;  // likely this member's
            product_item<T>(p, tile * TILE, first, rows, next);
        }
    }
    crew.meet(member);
}

}  // namespace
