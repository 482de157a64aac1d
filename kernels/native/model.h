// What the variants compute on: plain data, laid out by library.cpp and only read here.
//
// A packed matrix [N, K] is [N/16][K][16] in float32, and [N/16][K/2][16][2] in bfloat16: "panels"
// of 16 outputs, in which one step over K (or over a pair of it) is one cache line. N and K are
// padded with zeros to multiples of 32. Gate and up are one matrix whose panels alternate.

#pragma once

#include <cstddef>
#include <cstdint>

#include "crew.h"
#include "kvrelay_kernels.h"

namespace kvr {

constexpr int PANEL = 16;
constexpr int PAD = 32;       // of widths: whole steps over K for AMX, whole column tiles
constexpr int KEY_TILE = 128;  // keys per softmax tile, counted from position 0 of the request
constexpr int SPARE_ROWS = 32;  // that products by AMX may read past the last
// Up to so many rows are normed by every member for itself: cheaper than to wait for the others.
constexpr int FEW_ROWS = 32;
constexpr int MOST_HEAD_DIM = 512;
constexpr int MOST_QUERIES = 96;  // rows (positions x heads of a group) of one attention item
constexpr int64_t SHARED_BYTES = 4 << 20;  // of tiles packed at a time, if no head needs more
constexpr int COPIED_KEYS = 32;   // at a time, where rows of the pool need padding
constexpr int QUERY_ROWS = 16;    // of them, whose scores are computed at once

constexpr int DRAW_CHUNK = 64;  // ids whose weights are summed together when a token is drawn

// The first position that a query sees.
static constexpr int first_seen(int window, int position) {
    return window && position >= window ? position - window + 1 : 0;
}

static constexpr int padded(int width) { return (width + PAD - 1) / PAD * PAD; }

// Of the weights: by id a weight and a candidate's id, by chunk two numbers.
static constexpr int64_t weight_bytes(int vocab) {
    const int64_t chunks = (int64_t(vocab) + DRAW_CHUNK - 1) / DRAW_CHUNK;
    return (chunks * (DRAW_CHUNK * (8 + 4) + 2 * 8) + 63) / 64 * 64;
}

// What one member needs to draw: weights, and a row of logits to edit beside the bare one.
static constexpr int64_t draw_bytes(int vocab) {
    return weight_bytes(vocab) + (int64_t(vocab) * 4 + 63) / 64 * 64;
}

struct Matrix {
    void *data;
    int depth;  // padded K
    int width;  // N, not padded
};

struct Layer {
    float *attention_norm, *mlp_norm;
    float *qkv_bias;          // zeros without a bias
    float *q_norm, *k_norm;   // [padded head_dim]
    Matrix qkv, attention_out, gate_up, down;
};

// A key tile of one request for one KV head, packed once for all query tiles that see it.
struct PackItem {
    int row, head;
    int begin, end;  // positions of its keys
    int place;       // in Scratch::packed
};

// One query tile of one request for one KV head.
struct AttentionItem {
    int row, head;
    int begin, end;    // positions of the keys that it packs for itself, if any
    int first, count;  // of the row's tokens
    bool shared;       // its keys are packed before
    int place;         // then that of the key tile of position 0, as if that was packed, too
};

// What is done between meetings: what is packed, then what sees it. Each begins where the wave
// before it ends.
struct Wave {
    int packs_end, items_end;
};

struct Scratch {
    float *x;      // [T, E] the residual stream: float32 in both dtypes
    void *normed;  // [T, E], or a piece for each member: see FEW_ROWS
    size_t own_normed_bytes;
    float *qkv;    // [T, (Hq + 2 Hk) * D]
    void *q;       // [Hk, T, G, D]: rotated, head_dim padded with zeros
    void *mix;     // [T, Hq * D]
    void *gated;   // [T, F]
    int *position;  // [T]
    int64_t *slot;  // [T] block * block_size + slot
    void *packed;     // per place the keys of a tile, then its values: [KEY_TILE * D] each
    char *attention;  // one piece per member
    size_t attention_bytes;
};

enum class Piece { STEP, PRODUCT, ATTENTION, DRAW };

struct Job {
    kvr_config c;
    const Layer *layers;
    const float *norm, *rope;
    Matrix embed, head;
    Crew *crew;
    Scratch s;
    kvr_step_args a;
    const int *row_tokens;  // [rows] where each row's tokens begin
    const PackItem *packs;
    int pack_count;
    const AttentionItem *items;
    int item_count;
    const Wave *waves;
    int wave_count;
    bool one_item_each;  // per request and KV head
    int64_t *progress;
    int64_t *times;
    Piece piece;
    int layer, slot;  // of a piece
};

using Run = void (*)(void *job, int member);

}  // namespace kvr

extern "C" {
void kvr_run_portable(void *job, int member);
void kvr_run_avx2(void *job, int member);
void kvr_run_avx512bf16(void *job, int member);
void kvr_run_amx(void *job, int member);
}
