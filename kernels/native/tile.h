// The one product of the library: a few rows times a packed column tile of 32 outputs.
//
// The sum over K runs in one fixed order for every row and column, whatever the number of rows:
// that is what makes a result independent of batch, chunking and threads. Attention uses the same
// tile for scores (keys packed as weights) and for the mix of values.

#pragma once

#include "model.h"
#include "simd.h"

namespace {

using kvr::PANEL;

constexpr int TILE = 32;  // columns: two panels

struct Packed {
    const void *data;
    ptrdiff_t panel;  // elements from one panel to the next
    int depth;        // K, a multiple of 32
};

// Weights that are needed soon, asked for a few lines at a time. For a product by AMX the second
// cache is near enough; vectors are 8 % faster out of the first, with `KNOWN` lines.
template <int KNOWN> struct Ahead {
    const char *at = nullptr;
    ptrdiff_t other = 0;  // bytes to the tile's second panel
    int lines = 0;        // of each panel, per turn of the loop over K
    template <int CACHE> inline __attribute__((always_inline)) void fetch() {
        for (int line = 0; line < (KNOWN ? KNOWN : lines); ++line, at += 64) {
            __builtin_prefetch(at, 0, 4 - CACHE);
            __builtin_prefetch(at + other, 0, 4 - CACHE);
        }
    }
};
struct Nothing {
    template <int CACHE> inline void fetch() {}
};

// One step over K of a packed tile, of 32 outputs: a row, or for bf16 two whose elements alternate.
// The outputs may get another order, which `unweave` undoes: by AVX-512 bf16 is interleaved within
// 128 bits, at half the price of keeping the order. No sum depends on its neighbours.
constexpr int TILE_VECTORS = TILE / W;
inline void woven(const float *one, const float *, vu (&words)[TILE_VECTORS]) {
#pragma GCC unroll 16
    for (int v = 0; v < TILE_VECTORS; ++v) words[v] = load_as<vu>(one + v * W);
}
template <class T> inline void unweave(float *) {}
inline void woven(const bf16 *one, const bf16 *other, vu (&words)[TILE_VECTORS]) {
#if defined(__AVX512BW__)
    const __m512i even = load_as<__m512i>(one), odd = load_as<__m512i>(other);
    words[0] = (vu)_mm512_unpacklo_epi16(even, odd);  // fours of both, for every other four
    words[1] = (vu)_mm512_unpackhi_epi16(even, odd);
#else
#pragma GCC unroll 16
    for (int v = 0; v < TILE_VECTORS; ++v)
        words[v] = widen(load_as<vh>(one + v * W)) | (widen(load_as<vh>(other + v * W)) << 16);
#endif
}
template <class T> inline void weave(const T *one, const T *other, T *to, ptrdiff_t panel) {
    constexpr int PER_PANEL = PANEL / W, STEP = 4 / sizeof(T);
    vu words[TILE_VECTORS];
    woven(one, other, words);
#pragma GCC unroll 16
    for (int v = 0; v < TILE_VECTORS; ++v)
        store_as(to + v / PER_PANEL * panel + v % PER_PANEL * W * STEP, words[v]);
}
#if defined(__AVX512BW__)
template <> inline void unweave<bf16>(float *row) {
    vi first, second;
    for (int at = 0; at < W; ++at) {
        first[at] = at / 8 * 4 + at % 4 + at / 4 % 2 * W;
        second[at] = first[at] + W / 2;
    }
    const vf low = load(row), high = load(row + W);
    store(row, __builtin_shuffle(low, high, first));
    store(row + W, __builtin_shuffle(low, high, second));
}
#endif

inline vf dot(vf sum, const float *a, vu word) { return fma(splat(*a), (vf)word, sum); }

inline vf dot(vf sum, const bf16 *a, vu word) {
#if defined(__AVX512BF16__)
    __m512i pair = _mm512_set1_epi32(load_as<int32_t>(a));
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)word);
#else
    vf even = splat(to_float(a[0])), odd = splat(to_float(a[1]));
    sum = fma(even, (vf)(word << 16), sum);
    return fma(odd, (vf)(word & 0xffff0000u), sum);
#endif
}

// The same where `a` is not needed again: it comes out of memory with the instruction that adds.
inline vf dot_once(vf sum, const float *a, vu word) { return dot(sum, a, word); }
inline vf dot_once(vf sum, const bf16 *a, vu word) {
#if defined(__AVX512BF16__)
    const __m512i pair = _mm512_set1_epi32(load_as<int32_t>(a));
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)word, (__m512bh)pair);
#else
    return dot(sum, a, word);
#endif
}

// Registers hold ROWS x 32 sums: 24 of 32 with AVX-512, 8 of 16 with AVX2 and with SSE2.
#if defined(__AVX512F__)
constexpr int ROWS = 12, REGISTERS = 32;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS = 2, REGISTERS = 16;
#else
constexpr int ROWS = 1, REGISTERS = 16;
#endif

// With `more`, here and below, sums go on from what is in `out`.
//
// out[R][32] = a[R][K] times the tile; `lda` and `ldo` in elements.
template <int R, class T, class A>
inline void rows_times_tile(const T *a, ptrdiff_t lda, Packed w, float *out, ptrdiff_t ldo,
                            A ahead, bool more) {
    constexpr int VECTORS = TILE_VECTORS, PER_PANEL = PANEL / W;
    constexpr int STEP = 4 / sizeof(T);  // elements of K in one word
    vf sum[R][VECTORS] = {};
    const T *panels = static_cast<const T *>(w.data);
    if (more)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(out + r * ldo + v * W);
    for (int k = 0; k < w.depth; k += STEP) {
        ahead.template fetch<1>();
        vu word[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v)
            word[v] = load_as<vu>(panels + (v / PER_PANEL) * w.panel + k * PANEL +
                                  (v % PER_PANEL) * W * STEP);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = dot(sum[r][v], a + r * lda + k, word[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) store(out + r * ldo + v * W, sum[r][v]);
}

template <int R, class T, class A>
inline void few_rows_times_tile(const T *a, ptrdiff_t lda, int rows, Packed w, float *out,
                                ptrdiff_t ldo, A ahead, bool more) {
    if constexpr (R > 1)
        if (rows < R) return few_rows_times_tile<R - 1>(a, lda, rows, w, out, ldo, ahead, more);
    rows_times_tile<R>(a, lda, w, out, ldo, ahead, more);
}

// The first rows alone ask for what is `ahead`.
template <class T, class A>
inline void vector_tile(const T *a, ptrdiff_t lda, int rows, Packed w, float *out, ptrdiff_t ldo,
                        A ahead, bool more) {
    few_rows_times_tile<ROWS>(a, lda, rows < ROWS ? rows : ROWS, w, out, ldo, ahead, more);
    while (rows -= ROWS, a += ROWS * lda, out += ROWS * ldo, rows > 0)
        few_rows_times_tile<ROWS>(a, lda, rows < ROWS ? rows : ROWS, w, out, ldo, Nothing{}, more);
}

// out[rows][64]: two column tiles, side by side.
template <class T>
inline void wide_tile(const T *a, ptrdiff_t lda, int rows, Packed w, float *out, ptrdiff_t ldo,
                      bool more) {
    vector_tile(a, lda, rows, w, out, ldo, Nothing{}, more);
    w.data = static_cast<const T *>(w.data) + 2 * w.panel;
    vector_tile(a, lda, rows, w, out + TILE, ldo, Nothing{}, more);
}

#if defined(__AMX_BF16__)

constexpr int ROW_STEP = 32;  // rows that one call of `tile` does best

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void begin_tiles() {
    static const TileShapes shapes;  // static: the compiler believes that only 8 bytes are read
    _tile_loadconfig(&shapes);
}
inline void end_tiles() { _tile_release(); }

// 16 or 32 rows by 32 columns. Rows past the last are computed of whatever is there: both `a` and
// `out` have room up to a multiple of 16 rows.
template <class A = Nothing>
inline void tile(const bf16 *a, ptrdiff_t lda, int rows, Packed w, float *out, ptrdiff_t ldo,
                 A ahead = {}, bool more = false) {
    const bf16 *left = static_cast<const bf16 *>(w.data), *right = left + w.panel;
    for (; rows > 0; rows -= 32, a += 32 * lda, out += 32 * ldo) {
        const bool both = rows > 16;
        if (more) {
            _tile_loadd(0, out, ldo * 4);
            _tile_loadd(1, out + 16, ldo * 4);
            if (both) {
                _tile_loadd(2, out + 16 * ldo, ldo * 4);
                _tile_loadd(3, out + 16 * ldo + 16, ldo * 4);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (both) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (int k = 0; k < w.depth; k += 32) {
            ahead.template fetch<2>();
            _tile_loadd(4, left + k * PANEL, 64);
            _tile_loadd(5, right + k * PANEL, 64);
            _tile_loadd(6, a + k, lda * 2);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 6, 5);
            if (both) {
                _tile_loadd(7, a + 16 * lda + k, lda * 2);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        _tile_stored(0, out, ldo * 4);
        _tile_stored(1, out + 16, ldo * 4);
        if (both) {
            _tile_stored(2, out + 16 * ldo, ldo * 4);
            _tile_stored(3, out + 16 * ldo + 16, ldo * 4);
        }
    }
}
// 16 rows: with four sums on their way no product waits for the one before it.
inline void wide_tile(const bf16 *a, ptrdiff_t lda, int, Packed w, float *out, ptrdiff_t ldo,
                      bool more) {
    const bf16 *panels = static_cast<const bf16 *>(w.data);
    if (more) {
        _tile_loadd(0, out, ldo * 4);
        _tile_loadd(1, out + 16, ldo * 4);
        _tile_loadd(2, out + 32, ldo * 4);
        _tile_loadd(3, out + 48, ldo * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < w.depth; k += 32) {
        const bf16 *at = panels + k * PANEL;
        _tile_loadd(7, a + k, lda * 2);
        _tile_loadd(4, at, 64);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(5, at + w.panel, 64);
        _tile_dpbf16ps(1, 7, 5);
        _tile_loadd(6, at + 2 * w.panel, 64);
        _tile_dpbf16ps(2, 7, 6);
        _tile_loadd(4, at + 3 * w.panel, 64);
        _tile_dpbf16ps(3, 7, 4);
    }
    _tile_stored(0, out, ldo * 4);
    _tile_stored(1, out + 16, ldo * 4);
    _tile_stored(2, out + 32, ldo * 4);
    _tile_stored(3, out + 48, ldo * 4);
}
template <class A = Nothing>
inline void tile(const float *a, ptrdiff_t lda, int rows, Packed w, float *out, ptrdiff_t ldo,
                 A ahead = {}, bool more = false) {
    vector_tile(a, lda, rows, w, out, ldo, ahead, more);
}

#else

constexpr int ROW_STEP = ROWS;

inline void begin_tiles() {}
inline void end_tiles() {}
template <class T, class A = Nothing>
inline void tile(const T *a, ptrdiff_t lda, int rows, Packed w, float *out, ptrdiff_t ldo,
                 A ahead = {}, bool more = false) {
    vector_tile(a, lda, rows, w, out, ldo, ahead, more);
}

#endif

}  // namespace
