// Vectors of this variant's width, in the compiler's own vector types.
//
// Everything in the variants has internal linkage: a function that was compiled for a newer
// processor must never stand in for that of another variant.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t bf16;

template <class V, class P> inline V load_as(const P *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V, class P> inline void store_as(P *to, V v) { std::memcpy(to, &v, sizeof v); }
inline vf splat(float value) { return vf{} + value; }
inline float as_float(uint32_t bits) { return load_as<float>(&bits); }

// a * b + c, rounded once where the processor can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// To nearest, ties to even; NaN stays NaN.
inline vh narrow(vf v) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(v == v ? rounded : (vu{} + 0x7fc0), vh);
#endif
}
inline vu widen(vh v) { return __builtin_convertvector(v, vu); }

inline vf load(const float *from) { return load_as<vf>(from); }
inline vf load(const bf16 *from) { return (vf)(widen(load_as<vh>(from)) << 16); }
inline void store(float *to, vf v) { store_as(to, v); }
inline void store(bf16 *to, vf v) { store_as(to, narrow(v)); }
// Two vectors, one after the other.
inline void store(float *to, vf one, vf other) {
    store(to, one);
    store(to + W, other);
}
inline void store(bf16 *to, vf one, vf other) {
#if defined(__AVX512BF16__)
    store_as(to, (vu)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one));
#else
    store(to, one);
    store(to + W, other);
#endif
}
inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return as_float(uint32_t(v) << 16); }
inline void put(float *to, float v) { *to = v; }
inline void put(bf16 *to, float v) {
    vh all = narrow(splat(v));
    *to = all[0];
}

// Lane `at` of the result is lane `at ^ width`.
template <int width> inline vf swap_lanes(vf v) {
    vi from;
    for (int at = 0; at < W; ++at) from[at] = at ^ width;
    return __builtin_shuffle(v, from);
}

// The lanes of every use are added in one order: halves onto halves.
template <int width = W / 2> inline float sum_of_lanes(vf v) {
    v += swap_lanes<width>(v);
    if constexpr (width > 1) return sum_of_lanes<width / 2>(v);
    return v[0];
}
template <int width = W / 2> inline float largest_lane(vf v) {
    const vf other = swap_lanes<width>(v);
    v = other > v ? other : v;
    if constexpr (width > 1) return largest_lane<width / 2>(v);
    return v[0];
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

// The lanes of `width` at a time: of `a`, then of `b`; each the larger of its two neighbours so far.
template <int width> inline vf larger_of_pairs(vf a, vf b) {
    vi even, odd;
    for (int at = 0; at < W; ++at) {
        const int first = at / (2 * width) * 2 * width, place = at % (2 * width);
        even[at] = place < width ? first + place : W + first + place - width;
        odd[at] = even[at] + width;
    }
    return larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
}

// Lane `at` is the largest lane of rows[at].
template <int width = W / 2> inline vf largest_lanes(vf (&rows)[W]) {
#pragma GCC unroll 16
    for (int at = 0; at < width; ++at)
        rows[at] = larger_of_pairs<width>(rows[at], rows[at + width]);
    if constexpr (width > 1) return largest_lanes<width / 2>(rows);
    return rows[0];
}

// 0 for what AMX would take for 0, so that it is 0 too where no product came after it.
inline vf counting(vf v) {
    const vf size = (vf)((vi)v & 0x7fffffff);
    return size < 0x1p-126f ? splat(0.0f) : v;
}

// 2^x within 2e-7 relative, for x <= 127; 0 below -126; NaN stays NaN.
// 2^f on [-1/2, 1/2] is its Taylor series: the seventh term is under 2^-23 of it.
inline vf exp2(vf x) {
    const float to_integer = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    vf clamped = x > 127.0f ? splat(127.0f) : x;
    vf shifted = clamped + to_integer;
    vf f = clamped - (shifted - to_integer);
    vf power = splat(1.5252734e-5f);
    power = fma(power, f, splat(1.5403530e-4f));
    power = fma(power, f, splat(1.3333558e-3f));
    power = fma(power, f, splat(9.6181291e-3f));
    power = fma(power, f, splat(5.5504109e-2f));
    power = fma(power, f, splat(2.4022651e-1f));
    power = fma(power, f, splat(6.9314718e-1f));
    power = fma(power, f, splat(1.0f));
    vf scale = (vf)(((vi)shifted << 23) + (127 << 23));
    return x < -126.0f ? splat(0.0f) : power * scale;
}

// 2^x within 1e-4 relative and exact at 0, for what is rounded to bfloat16, which is 20 times as
// coarse; 0 below -126; NaN stays NaN. 2^f on [0, 1) is 1 + f (a + f (b + f c)), whose largest
// relative error is the least that a cubic with p(0) = 1 can have.
inline vf rough_exp2(vf x) {
#if defined(__AVX512DQ__)
    // What underflows is masked away: to scale it would cost a trap of the processor's own.
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    vf power = splat(0.0770670512f);
    power = fma(power, f, splat(0.227644981f));
    power = fma(power, f, splat(0.695116789f));
    power = fma(power, f, splat(1.0f));
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)power, (__m512)x);  // by its floor
#else
    return exp2(x);
#endif
}
inline vf exp2_for(float, vf x) { return exp2(x); }
inline vf exp2_for(bf16, vf x) { return rough_exp2(x); }

// a / b, where it is rounded to bfloat16 within 6e-5; a / inf is 0.
inline vf quotient_for(float, vf a, vf b) { return a / b; }
inline vf quotient_for(bf16, vf a, vf b) {
#if defined(__AVX512F__)
    return a * (vf)_mm512_rcp14_ps((__m512)b);
#else
    return a / b;
#endif
}

// Transposes W rows of W words.
#if defined(__AVX512F__)
// Within 128 bits, then those among each other: no shuffle needs a table, so all registers are free.
inline __attribute__((always_inline)) void transpose(vu (&rows)[W]) {
    __m512i fours[W], *const to = reinterpret_cast<__m512i *>(rows);
#pragma GCC unroll 16
    for (int at = 0; at < W; at += 4) {
        const __m512i low = _mm512_unpacklo_epi32(to[at], to[at + 1]);
        const __m512i high = _mm512_unpackhi_epi32(to[at], to[at + 1]);
        const __m512i other_low = _mm512_unpacklo_epi32(to[at + 2], to[at + 3]);
        const __m512i other_high = _mm512_unpackhi_epi32(to[at + 2], to[at + 3]);
        fours[at] = _mm512_unpacklo_epi64(low, other_low);
        fours[at + 1] = _mm512_unpackhi_epi64(low, other_low);
        fours[at + 2] = _mm512_unpacklo_epi64(high, other_high);
        fours[at + 3] = _mm512_unpackhi_epi64(high, other_high);
    }
#pragma GCC unroll 16
    for (int at = 0; at < 4; ++at) {
        const __m512i low = _mm512_shuffle_i32x4(fours[at], fours[at + 4], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(fours[at], fours[at + 4], 0xee);
        const __m512i other_low = _mm512_shuffle_i32x4(fours[at + 8], fours[at + 12], 0x44);
        const __m512i other_high = _mm512_shuffle_i32x4(fours[at + 8], fours[at + 12], 0xee);
        to[at] = _mm512_shuffle_i32x4(low, other_low, 0x88);
        to[at + 4] = _mm512_shuffle_i32x4(low, other_low, 0xdd);
        to[at + 8] = _mm512_shuffle_i32x4(high, other_high, 0x88);
        to[at + 12] = _mm512_shuffle_i32x4(high, other_high, 0xdd);
    }
}
#else
// Each round interleaves the first half of the rows with the second.
inline __attribute__((always_inline)) void transpose(vu (&rows)[W]) {
    vi low, high;
    for (int at = 0; at < W; ++at) {
        low[at] = at / 2 + (at % 2) * W;
        high[at] = low[at] + W / 2;
    }
#pragma GCC unroll 4
    for (int round = 1; round < W; round *= 2) {
        vu next[W];
#pragma GCC unroll 16
        for (int at = 0; at < W / 2; ++at) {
            next[2 * at] = __builtin_shuffle(rows[at], rows[at + W / 2], low);
            next[2 * at + 1] = __builtin_shuffle(rows[at], rows[at + W / 2], high);
        }
#pragma GCC unroll 16
        for (int at = 0; at < W; ++at) rows[at] = next[at];
    }
}
#endif

}  // namespace
