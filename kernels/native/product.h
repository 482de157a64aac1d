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

constexpr int ROW_BLOCK = 192;  // rows of one work item: their inputs stay in the second cache

inline vf silu(vf x) {
    const float minus_log2_e = -1.44269504f;
    return x / (exp2(x * minus_log2_e) + 1.0f);
}

template <class T> inline void finish(const Product &p, const float *sums, int row, int column) {
    if (p.then == Then::GATE) {
        T *out = static_cast<T *>(p.out) + row * p.ldo + column / 2;
        for (int at = 0; at < PANEL; at += W)
            store(out + at, silu(load(sums + at)) * load(sums + PANEL + at));
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

template <class T> inline void product_item(const Product &p, int column, int first, int rows) {
    alignas(64) float sums[ROW_STEP * TILE];
    const T *a = static_cast<const T *>(p.a);
    const ptrdiff_t panel = ptrdiff_t(p.w.depth) * PANEL;
    const Packed w{static_cast<const T *>(p.w.data) + column / PANEL * panel, panel, p.w.depth};
    for (int row = first; row < first + rows; row += ROW_STEP) {
        const int count = first + rows - row < ROW_STEP ? first + rows - row : ROW_STEP;
        tile(a + row * p.lda, p.lda, count, w, sums, TILE);
        for (int r = 0; r < count; ++r) finish<T>(p, sums + r * TILE, row + r, column);
    }
}

// A phase: all members call it with the same product.
template <class T> inline void product(kvr::Crew &crew, const Product &p) {
    const int tiles = (p.w.width + TILE - 1) / TILE, blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for (int item; (item = crew.take()) < tiles * blocks;) {
        const int first = item % blocks * ROW_BLOCK;
        const int left = p.rows - first;
        product_item<T>(p, item / blocks * TILE, first, left < ROW_BLOCK ? left : ROW_BLOCK);
    }
    crew.meet();
}

}  // namespace
