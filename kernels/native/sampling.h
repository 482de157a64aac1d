// Draws one token from one row of logits. `shared/sampling/sampler.py` is the reference of the law:
// temperature, top_k, top_p of what top_k left, min_p relative to the likeliest; the uniform number
// of (seed, choice, index) inverts the cumulative weights in vocabulary order, all in float64.
//
// Every filter keeps the first ids in one order: the greater weight first, of equal ones the lower
// id. What it keeps ends at an edge, an id; the others lose their weights.

#pragma once

#include "edits.h"

namespace {

// Philox4x64-10 with key (seed, choice) and counter (index, 0, 0, 0): the first word's top 53 bits.
inline double uniform(uint64_t seed, uint64_t choice, uint64_t index) {
    uint64_t word[4] = {index, 0, 0, 0};
    for (int round = 0; round < 10; ++round) {
        const auto first = static_cast<unsigned __int128>(word[0]) * 0xD2E7470EE14C6C93u;
        const auto second = static_cast<unsigned __int128>(word[2]) * 0xCA5A826395121157u;
        word[0] = uint64_t(second >> 64) ^ word[1] ^ seed;
        word[2] = uint64_t(first >> 64) ^ word[3] ^ choice;
        word[1] = uint64_t(second);
        word[3] = uint64_t(first);
        seed += 0x9E3779B97F4A7C15u;
        choice += 0xBB67AE8584CAA73Bu;
    }
    return double(word[0] >> 11) * 0x1p-53;
}

struct Top {
    float value;  // NaN if there is one, -inf of no ids
    int id;       // the first that has it
};

// One pass; only the group that holds the largest logit is looked at again.
inline Top top_of(const float *row, int count) {
    constexpr int GROUP = 16 * W;
    const float none = -__builtin_inff();
    float best = none, last[GROUP];
    int best_at = 0;
    vi bad = {};
    for (int at = 0; at < count; at += GROUP) {
        const float *from = row + at;
        if (at + GROUP > count) {
            for (int k = 0; k < GROUP; ++k) last[k] = at + k < count ? from[k] : none;
            from = last;
        }
        vf most[4] = {splat(none), splat(none), splat(none), splat(none)};
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) {
            const vf v = load(from + k * W);
            bad |= v != v;
            most[k % 4] = v > most[k % 4] ? v : most[k % 4];
        }
        for (int k = 1; k < 4; ++k) most[0] = most[k] > most[0] ? most[k] : most[0];
        const float largest = largest_lane(most[0]);
        if (largest > best) best = largest, best_at = at;
    }
    for (int lane = 0; lane < W; ++lane)
        if (bad[lane]) return {__builtin_nanf(""), 0};
    while (best_at < count && row[best_at] != best) ++best_at;
    return {best, best_at};
}

struct Edge {
    double value;
    int id;
};

inline uint64_t bits_of(double value) { return load_as<uint64_t>(&value); }

// The last of the fewest candidates, in that order, whose measures reach `wanted`; the last of all
// if none do. A measure is the value itself, or 1. Candidates come by ascending id and are used up.
// Each round splits the range of the values' bits in 256 and goes on where the edge lies.
inline Edge edge_of(const double *values, int32_t *ids, int count, double wanted, bool by_value) {
    constexpr int BINS = 256;
    for (;;) {
        uint64_t low = ~uint64_t(0), high = 0;
        for (int at = 0; at < count; ++at) {
            const uint64_t bits = bits_of(values[ids[at]]);
            low = bits < low ? bits : low;
            high = bits > high ? bits : high;
        }
        if (low >= high) break;
        int shift = 0;
        while ((high - low) >> shift >= BINS) ++shift;
        double measure[BINS] = {};
        for (int at = 0; at < count; ++at) {
            const double value = values[ids[at]];
            measure[(bits_of(value) - low) >> shift] += by_value ? value : 1.0;
        }
        uint64_t bin = (high - low) >> shift;
        for (; bin > 0 && measure[bin] < wanted; --bin) wanted -= measure[bin];
        int left = 0;
        for (int at = 0; at < count; ++at) {
            const int32_t id = ids[at];
            ids[left] = id;
            left += (bits_of(values[id]) - low) >> shift == bin;
        }
        count = left;
    }
    int at = 0;
    for (; at + 1 < count; ++at)
        if ((wanted -= by_value ? values[ids[at]] : 1.0) <= 0.0) break;
    return {values[ids[at]], ids[at]};
}

// What weighs less is never drawn, and need not be ranked.
constexpr double LEAST = 0x1p-1022;

inline void keep_top_k(Weights &weights, int top_k) {
    double least = LEAST;
    if (top_k <= weights.chunks) {  // as many chunks hold one id at least as likely as this
        for (int chunk = 0; chunk < weights.chunks; ++chunk) weights.ids[chunk] = chunk;
        const Edge edge = edge_of(weights.largest, weights.ids, weights.chunks, top_k, false);
        least = edge.value > LEAST ? edge.value : LEAST;
    }
    const int found = weights.collect(least);
    const Edge edge = edge_of(weights.of, weights.ids, found, top_k, false);
    weights.keep(edge.value, edge.id);
}

inline void keep_top_p(Weights &weights, double top_p) {
    const double total = weights.total();
    // All ids under this together weigh less than half of what may be left out.
    double least = (1.0 - top_p) * total / (2.0 * weights.count);
    least = least < LEAST ? LEAST : least < 1.0 ? least : 1.0;
    const int found = weights.collect(least);
    const Edge edge = edge_of(weights.of, weights.ids, found, top_p * total, true);
    weights.keep(edge.value, edge.id);
}

// The first id at which the cumulative weight passes `number` of the whole.
inline int pick(const Weights &weights, double number) {
    const double total = weights.total();
    // Rounding may bring the target up to the very end, where ids of no weight may lie.
    const double end = __builtin_nextafter(total, 0.0);
    const double target = number * total < end ? number * total : end;
    double before = 0.0;
    int chunk = 0;
    for (; chunk + 1 < weights.chunks && before + weights.sum[chunk] <= target; ++chunk)
        before += weights.sum[chunk];
    int found = 0;
    for (int id = chunk * CHUNK; id < chunk * CHUNK + CHUNK; ++id) {
        if (weights.of[id] == 0.0) continue;
        found = id;
        before += weights.of[id];
        if (before > target) break;
    }
    return found;
}

// Why the row gives no token, if it does not.
inline int status_of(const Top &top) {
    if (top.value != top.value) return KVR_DRAW_NAN;
    if (__builtin_isfinite(top.value)) return KVR_DRAWN;
    return top.value > 0 ? KVR_DRAW_INFINITE : KVR_DRAW_NOTHING;
}

inline kvr_drawn drawn_of(Weights &weights, const float *row, const kvr_draw &draw) {
    const Top top = top_of(row, weights.count);
    if (const int status = status_of(top)) return {0, status};
    if (!(draw.temperature > 0.0)) return {top.id, KVR_DRAWN};
    weights.weigh(row, top.value, draw.temperature);
    if (draw.top_k > 0 && draw.top_k < weights.count) keep_top_k(weights, draw.top_k);
    if (draw.top_p < 1.0) keep_top_p(weights, draw.top_p);
    if (draw.min_p > 0.0) weights.keep(draw.min_p, weights.count);
    return {pick(weights, uniform(draw.seed, draw.choice, draw.index)), KVR_DRAWN};
}

// From the row after its edits, which may change it.
inline kvr_drawn drawn_from(const kvr::Job &job, const kvr_draw &draw, Weights &weights,
                            float *row) {
    if (draw.given >= 0) return {draw.given, KVR_DRAWN};
    if (draw.edits) edit(row, draw.limit, *draw.edits);
    for (int at = 0; at < draw.banned; ++at) {
        const int32_t id = job.a.banned[draw.banned_at + at];
        if (id >= 0 && id < draw.limit) row[id] = -__builtin_inff();
    }
    return drawn_of(weights, row, draw);
}

// Draw `number`, from its row; `work` has kvr::draw_bytes.
inline void draw_row(const kvr::Job &job, int number, float *row, void *work) {
    const kvr_draw &draw = job.a.draws[number];
    kvr_drawn &drawn = job.a.drawn[number];
    Weights weights(work, job.c.vocab, draw.limit);
    if (draw.tops < 0) {
        drawn = drawn_from(job, draw, weights, row);
        return;
    }
    const Top top = top_of(row, draw.limit);
    drawn = {0, status_of(top)};
    if (drawn.status) return;
    weights.weigh(row, top.value, 1.0);
    const double whole = top.value + __builtin_log(weights.total());
    float *edited = row;
    if (draw.edits || draw.banned) {
        edited = reinterpret_cast<float *>(static_cast<char *>(work) +
                                           kvr::weight_bytes(job.c.vocab));
        __builtin_memcpy(edited, row, sizeof(float) * draw.limit);
    }
    drawn = drawn_from(job, draw, weights, edited);
    if (!drawn.status)
        tell(row, draw.limit, whole, drawn.token, draw.tops, job.a.told[number]);
}

}  // namespace
