// What a request asks to be done to its logits before a token is drawn, and what it asks to be told
// of them as they were. `shared/sampling/edits.py` and `shared/sampling/logprobs.py` are the
// references: edits are computed in float64 and rounded, each kind for itself, so that both give the
// same bits.

#pragma once

#include "weights.h"

namespace {

// A finite logit stays finite, however it is edited: only what the model gave can spoil a row.
inline float rounded(double logit) {
    constexpr double MOST = __FLT_MAX__;
    return float(logit > MOST ? MOST : logit < -MOST ? -MOST : logit);
}

inline void penalise(float *row, int limit, const kvr_edits &edits) {
    for (int64_t at = 0; at < edits.known; ++at) {
        const int32_t id = edits.known_ids[2 * at], times = edits.known_ids[2 * at + 1];
        if (id < 0 || id >= limit || !__builtin_isfinite(row[id])) continue;
        double logit = row[id];
        logit = logit > 0.0 ? logit / edits.repetition : logit * edits.repetition;
        if (times > 0) logit -= edits.presence + edits.frequency * times;
        row[id] = rounded(logit);
    }
}

inline void allow(float *row, int limit, const uint32_t *mask) {
    for (int first = 0; first < limit; first += 32) {
        uint32_t bits = mask[first / 32];
        if (bits == ~uint32_t(0)) continue;
        for (int id = first; id < limit && id < first + 32; ++id, bits >>= 1)
            if (!(bits & 1)) row[id] = -__builtin_inff();
    }
}

inline void edit(float *row, int limit, const kvr_edits &edits) {
    penalise(row, limit, edits);
    for (int64_t at = 0; at < edits.biased; ++at) {
        const int32_t id = edits.biased_ids[at];
        if (id < 0 || id >= limit || !__builtin_isfinite(row[id])) continue;
        row[id] = rounded(row[id] + edits.bias[at]);
    }
    for (const uint32_t *mask : edits.masks)
        if (mask) allow(row, limit, mask);
}

// Ids that come before this one: the greater logit first, of equal ones the lower id.
inline int ids_before(const float *row, int limit, int id) {
    const float logit = row[id];
    int before = 0;
    for (int at = 0; at < id; ++at) before += row[at] >= logit;
    for (int at = id + 1; at < limit; ++at) before += row[at] > logit;
    return before;
}

// The first `count` ids in that order; -1 where there are no more.
inline void first_ids(const float *row, int limit, int count, int32_t *ids) {
    constexpr int GROUP = 64;
    int found = 0;
    for (int first = 0; count && first < limit; first += GROUP) {
        const int end = first + GROUP < limit ? first + GROUP : limit;
        if (found == count) {  // of an equal logit the earlier id stays
            const float least = row[ids[found - 1]];
            int better = 0;
            for (int id = first; id < end; ++id) better |= row[id] > least;
            if (!better) continue;
        }
        for (int id = first; id < end; ++id) {
            if (found == count && !(row[id] > row[ids[found - 1]])) continue;
            int at = found < count ? found++ : found - 1;
            for (; at > 0 && row[id] > row[ids[at - 1]]; --at) ids[at] = ids[at - 1];
            ids[at] = id;
        }
    }
    for (; found < count; ++found) ids[found] = -1;
}

// `whole` is the logarithm of the sum of e^logit over the row.
inline void tell(const float *row, int limit, double whole, int id, int tops, kvr_told &told) {
    told.logprob = float(row[id] - whole);
    told.rank = 1 + ids_before(row, limit, id);
    first_ids(row, limit, tops, told.ids);
    for (int at = 0; at < tops; ++at)
        told.logprobs[at] = told.ids[at] < 0 ? 0.0f : float(row[told.ids[at]] - whole);
}

}  // namespace
