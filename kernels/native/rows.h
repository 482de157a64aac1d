// What is done row by row: embedding, norms, rotation and the write of keys and values.

#pragma once

#include "model.h"
#include "simd.h"

namespace {

using kvr::padded;
using kvr::PANEL;

template <class T> inline void copy_as(T *to, const float *from, int width) {
    int at = 0;
    for (; at + W <= width; at += W) store(to + at, load(from + at));
    for (; at < width; ++at) put(to + at, from[at]);
}

// Row `token` of the packed embedding, in float32.
template <class T> inline void embed(const kvr::Matrix &table, int token, float *x) {
    constexpr int STEP = 4 / sizeof(T);
    const T *from = static_cast<const T *>(table.data) +
                    int64_t(token / PANEL) * table.depth * PANEL +
                    token % PANEL * STEP;
    for (int k = 0; k < table.depth; ++k)
        x[k] = to_float(from[k / STEP * PANEL * STEP + k % STEP]);
}

// x, weight and out are `width` wide and padded with zeros to a multiple of 32.
template <class T>
inline void rms_norm(const float *x, const float *weight, int width, float eps, T *out) {
    const int all = padded(width);
    vf squares = {};
    for (int at = 0; at < all; at += W) squares = fma(load(x + at), load(x + at), squares);
    const float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / float(width) + eps);
    for (int at = 0; at < all; at += W) store(out + at, load(x + at) * scale * load(weight + at));
}

// Dimension d turns with d + half. `angles` is cosines, then sines. `to` may be `head`.
inline void rotate(const float *head, const float *angles, int half, float *to) {
    int d = 0;
    for (; d + W <= half; d += W) {
        const vf low = load(head + d), high = load(head + d + half);
        const vf cosine = load(angles + d), sine = load(angles + half + d);
        store(to + d, low * cosine - high * sine);
        store(to + d + half, high * cosine + low * sine);
    }
    for (; d < half; ++d) {
        const float low = head[d], high = head[d + half];
        to[d] = low * angles[d] - high * angles[half + d];
        to[d + half] = high * angles[d] + low * angles[half + d];
    }
}

// The key (0) or value (1) of a slot.
template <class T>
inline T *pool_row(const kvr::Job &job, int layer, int which, int64_t slot, int head) {
    const kvr_config &c = job.c;
    const int64_t block = slot / c.block_size, place = slot % c.block_size;
    const int64_t piece = ((block * c.layers + layer) * 2 + which) * c.kv_heads + head;
    return static_cast<T *>(job.a.pool) + (piece * c.block_size + place) * c.head_dim;
}

// One token and one KV head: its group's queries into job.s.q, its key and value into the pool.
template <class T> inline void rope_write(const kvr::Job &job, int layer, int token, int kv_head) {
    const kvr_config &c = job.c;
    const kvr::Layer &weights = job.layers[layer];
    const int dim = c.head_dim, wide = padded(dim), group = c.heads / c.kv_heads;
    const float *qkv = job.s.qkv + int64_t(token) * padded((c.heads + 2 * c.kv_heads) * dim);
    const float *angles = job.rope + int64_t(job.s.position[token]) * dim;
    const int64_t slot = job.s.slot[token];
    alignas(64) float head[kvr::MOST_HEAD_DIM];
    for (int at = dim; at < wide; ++at) head[at] = 0.0f;
    const auto turn = [&](int number, const float *norm) {
        const float *from = qkv + number * dim;
        if (c.qk_norm) {
            std::memcpy(head, from, dim * sizeof(float));
            rms_norm(head, norm, dim, c.rms_eps, head);
            from = head;
        }
        rotate(from, angles, dim / 2, head);
    };
    T *q = static_cast<T *>(job.s.q) + (int64_t(kv_head) * job.a.tokens + token) * group * wide;
    for (int g = 0; g < group; ++g, q += wide) {
        turn(kv_head * group + g, weights.q_norm);
        for (int at = 0; at < wide; at += W) store(q + at, load(head + at));
    }
    turn(c.heads + kv_head, weights.k_norm);
    copy_as(pool_row<T>(job, layer, 0, slot, kv_head), head, dim);
    copy_as(pool_row<T>(job, layer, 1, slot, kv_head),
            qkv + (c.heads + c.kv_heads + kv_head) * dim, dim);
}

}  // namespace
