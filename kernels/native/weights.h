// The float64 weights e^((logit - top) / temperature) of one row, in memory that a draw is given:
// in chunks of 64 ids, and by chunk their sum and the largest. After the one pass that makes them,
// chunks without an id that matters are skipped. Sums run in an order that depends on the row's
// length alone.

#pragma once

#include "model.h"
#include "simd.h"

namespace {

constexpr int CHUNK = kvr::DRAW_CHUNK;
constexpr int HALF = W / 2;  // float64 numbers in a vector

typedef double vd __attribute__((vector_size(4 * W)));
typedef int64_t vl __attribute__((vector_size(4 * W)));
typedef float v_half __attribute__((vector_size(2 * W)));

inline vd fma(vd a, vd b, vd c) {
#if defined(__AVX512F__)
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, within 5e-16 relative and exact at 0; below -708 it is 0.
// e^x = 2^n e^r with |r| <= ln(2) / 2, whose Taylor series ends at r^13 / 13!: what is left is
// under 5e-18. n times the high part of ln(2) is exact: its last 21 bits are zeros.
inline vd exp_of_negative(vd x) {
    const double to_integer = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    vd clamped = x < -708.0 ? vd{} - 708.0 : x;
    vd shifted = clamped * 0x1.71547652b82fep+0 + to_integer;
    vd n = shifted - to_integer;
    vd r = fma(n, vd{} - 0x1.62e42feep-1, clamped);
    r = fma(n, vd{} - 0x1.a39ef35793c76p-33, r);
    constexpr double INVERSE_FACTORIALS[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0, 1.0};
    vd power = vd{} + 1.0 / 6227020800;
#pragma GCC unroll 13
    for (double factor : INVERSE_FACTORIALS) power = fma(power, r, vd{} + factor);
    vd scale = (vd)(((vl)shifted << 52) + (int64_t(1023) << 52));
    return x < -708.0 ? vd{} : power * scale;
}

struct Weights {
    int count, chunks;  // ids, and chunks of them
    double *of;         // [chunks * CHUNK] by id, zeros past the end; stale where sum is 0
    double *sum, *largest;  // [chunks]
    int32_t *ids;           // [chunks * CHUNK]: candidates for an edge

    Weights(void *work, int vocab, int count_)
        : count(count_), chunks((count_ + CHUNK - 1) / CHUNK), of(static_cast<double *>(work)) {
        const int64_t most = (vocab + CHUNK - 1) / CHUNK;
        sum = of + most * CHUNK;
        largest = sum + most;
        ids = reinterpret_cast<int32_t *>(largest + most);
    }

    double total() const {
        double all = 0.0;
        for (int chunk = 0; chunk < chunks; ++chunk) all += sum[chunk];
        return all;
    }

    void tally(int chunk) {
        vd added = {}, most = {};
        const double *from = of + chunk * CHUNK;
        for (int at = 0; at < CHUNK; at += HALF) {
            const vd v = load_as<vd>(from + at);
            added += v;
            most = v > most ? v : most;
        }
        double parts[2][HALF];
        store_as(parts[0], added);
        store_as(parts[1], most);
        for (int width = HALF / 2; width > 0; width /= 2)
            for (int at = 0; at < width; ++at) {
                const double other = parts[1][at + width];
                parts[0][at] += parts[0][at + width];
                parts[1][at] = other > parts[1][at] ? other : parts[1][at];
            }
        sum[chunk] = parts[0][0];
        largest[chunk] = parts[1][0];
    }

    // e^((logit - top) / temperature), where `top` is the largest of the row.
    void weigh(const float *row, double top, double temperature) {
        float last[CHUNK];
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int first = chunk * CHUNK;
            const float *from = row + first;
            if (first + CHUNK > count) {
                for (int at = 0; at < CHUNK; ++at)
                    last[at] = first + at < count ? from[at] : -__builtin_inff();
                from = last;
            }
            for (int at = 0; at < CHUNK; at += HALF) {
                const vd logit = __builtin_convertvector(load_as<v_half>(from + at), vd);
                store_as(of + first + at, exp_of_negative((logit - top) / temperature));
            }
            tally(chunk);
        }
    }

    // Those that weigh at least `least` become the candidates; their number.
    int collect(double least) {
        int found = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (largest[chunk] < least) continue;
            for (int id = chunk * CHUNK, end = id + CHUNK; id < end; ++id) {
                ids[found] = id;
                found += of[id] >= least;
            }
        }
        return found;
    }

    // Ids after the edge, in the order of weight and id, weigh nothing any more.
    void keep(double edge, int last) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (largest[chunk] < edge) {
                sum[chunk] = largest[chunk] = 0.0;
                continue;
            }
            for (int id = chunk * CHUNK, end = id + CHUNK; id < end; ++id) {
                const bool kept = of[id] > edge || (of[id] == edge && id <= last);
                of[id] = kept ? of[id] : 0.0;
            }
            tally(chunk);
        }
    }
};

}  // namespace
