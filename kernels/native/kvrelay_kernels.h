// The C ABI of libkvrelay_kernels: one decoder-only model, computed one engine step per call.
//
// A model is made, filled tensor by tensor, and then stepped. Calls on one model never overlap, but
// for `kvr_set` of different tensors; the library's own threads sleep between them. Nothing here allocates during a step, unless a step has
// more tokens than any before it.

#pragma once

#include <cstdint>

#define KVR_API extern "C" __attribute__((visibility("default")))

enum kvr_dtype : int32_t { KVR_FLOAT32 = 0, KVR_BFLOAT16 = 1 };

// From the slowest to the fastest. Results differ between variants in their last bits.
enum kvr_variant : int32_t { KVR_PORTABLE = 0, KVR_AVX2 = 1, KVR_AVX512BF16 = 2, KVR_AMX = 3 };

enum kvr_slot : int32_t {
    KVR_EMBED = 0,       // [vocab, hidden]
    KVR_HEAD,            // [vocab, hidden]; not set when tied: the head is the embedding
    KVR_NORM,            // [hidden]
    KVR_ATTENTION_NORM,  // [hidden]; from here on one per layer
    KVR_Q,               // [heads * head_dim, hidden]
    KVR_K,               // [kv_heads * head_dim, hidden]
    KVR_V,
    KVR_Q_BIAS,
    KVR_K_BIAS,
    KVR_V_BIAS,
    KVR_Q_NORM,  // [head_dim]
    KVR_K_NORM,
    KVR_ATTENTION_OUT,  // [hidden, heads * head_dim]
    KVR_MLP_NORM,       // [hidden]
    KVR_GATE,           // [intermediate, hidden]
    KVR_UP,
    KVR_DOWN,  // [hidden, intermediate]
    KVR_ROPE,  // [positions, 2, head_dim / 2]: cosines, sines; float32, borrowed, not copied
};

enum kvr_status : int32_t {
    KVR_OK = 0,
    KVR_BAD_SHAPE = 1,     // a tensor that the configuration does not have, or not in this shape
    KVR_BAD_TOKEN = 2,     // a token id outside the vocabulary
    KVR_BAD_POSITION = 3,  // a position outside the rope table, or before the request's begin
    KVR_BAD_BLOCK = 4,     // a needed entry of a block table outside the pool
    KVR_NO_MEMORY = 5,
    // A limit beyond the vocabulary, a given id beyond the limit, banned ids beyond their array, more
    // tops than there can be, or no memory.
    KVR_BAD_DRAW = 6,
};

// Of one row's draw.
enum kvr_draw_status : int32_t {
    KVR_DRAWN = 0,
    KVR_DRAW_NAN = 1,       // a logit is NaN
    KVR_DRAW_INFINITE = 2,  // the largest is infinite
    KVR_DRAW_NOTHING = 3,   // all are banned or -inf
};

struct kvr_config {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, block_size;
    int32_t window;  // positions a query sees, its own included; 0 is all
    int32_t dtype;   // kvr_dtype of weights, of activations between operations and of the pool
    int32_t tied, qkv_bias, qk_norm;
    float rms_eps;
};

// What is done to a row's logits before its draw, in the order given; ids that do not exist are
// ignored, and what is not finite is left as it is.
struct kvr_edits {
    // Of known ids: a positive logit is divided by `repetition`, others are multiplied with it; then
    // those that the answer has lose `presence`, and `frequency` for each time.
    double repetition, presence, frequency;
    const int32_t *known_ids;  // [known][2]: each id once, and how often the answer has it
    int64_t known;
    const int32_t *biased_ids;  // [biased], each once
    const double *bias;         // [biased] what their logits gain
    int64_t biased;
    // Null: all. Bit id % 32 of word id / 32 says whether the id may be drawn, for ids up to limit.
    const uint32_t *masks[2];
};

constexpr int32_t KVR_MOST_TOPS = 20;

// Logprobs in the softmax of a row's bare logits below the limit: no edits, no temperature, no
// filter, no bans. The likeliest id has the rank 1; of equal ones the lowest comes first.
struct kvr_told {
    float logprob;  // of the row's token
    int32_t rank;
    int32_t ids[KVR_MOST_TOPS];  // the first of the draw's `tops` are set; -1: there are no more
    float logprobs[KVR_MOST_TOPS];
};

// How one wanted row's token is drawn. Temperature comes first (0: the likeliest id, nothing else
// counts), then top_k (0: off), top_p (1: off) of the mass that top_k left, and min_p (0: off)
// relative to the likeliest id. Ids of equal weight rank by id, the lowest first. The noise is
// Philox4x64-10 with key (seed, choice) and counter (index, 0, 0, 0).
struct kvr_draw {
    double temperature, top_p, min_p;
    uint64_t seed, choice, index;
    const kvr_edits *edits;  // null: none
    int32_t top_k;
    int32_t limit;              // ids from here on are not drawn; at most vocab
    int32_t banned_at, banned;  // which of the step's banned ids are this row's
    int32_t given;              // not negative: the row's token, nothing is drawn
    int32_t tops;               // how many of the likeliest are told; negative: nothing is
};

struct kvr_drawn {
    int32_t token, status;  // kvr_draw_status; the token is 0 unless drawn
};

// One step. Row i computes counts[i] tokens at positions starts[i]...; its block table is
// tables[table_offsets[i]...], of which only the entries that its positions need are read.
struct kvr_step_args {
    void *pool;  // [blocks][layers][K|V][kv_heads][block_size][head_dim]
    int64_t pool_blocks;
    int32_t tokens, rows;
    const int32_t *token_ids;  // [tokens], row by row
    const int32_t *starts, *counts;
    const int64_t *table_offsets;  // [rows]
    const int32_t *tables;
    int32_t wanted;             // how many tokens get logits
    const int32_t *wanted_at;   // [wanted] indices into token_ids
    float *logits;              // [wanted, vocab], or [logit_rows, vocab] with draws

    // [wanted]; null: logits only. Of logits, `logit_rows` rows are computed at a time and drawn
    // from, which may edit them.
    const kvr_draw *draws;
    int32_t logit_rows;
    const int32_t *banned;
    int64_t all_banned;  // how many
    kvr_drawn *drawn;    // [wanted]
    kvr_told *told;      // [wanted], set where a draw asks and gives a token; null: none asks
    void *draw_memory;  // kvr_draw_memory bytes, of any contents
    int64_t draw_memory_bytes;
    int32_t alone;  // not 0: the caller's thread computes all, and leaves the other processors alone
};

struct kvr_model;

// Raised with every change of this header; the binding wants its own.
constexpr int32_t KVR_ABI = 4;
KVR_API int32_t kvr_abi();

// 1 if this processor and this build have the variant.
KVR_API int32_t kvr_has_variant(int32_t variant);

// NULL without memory, or without the variant. `threads` includes the caller's own.
KVR_API kvr_model *kvr_create(const kvr_config *config, int32_t variant, int32_t threads);
KVR_API void kvr_destroy(kvr_model *model);

// Copies (and packs) one tensor: matrices in the model's dtype, all else in float32, row-major. The
// rows of a matrix may come in several calls, in their order.
KVR_API int32_t kvr_set(kvr_model *model, int32_t slot, int32_t layer, const void *values,
                        int64_t rows, int64_t columns);

KVR_API int32_t kvr_step(kvr_model *model, const kvr_step_args *args);

// Bytes that a step with draws works in.
KVR_API int64_t kvr_draw_memory(const kvr_model *model);

// A counter that grows with every layer of a step, and between rows of logits that are computed one
// after the other; may be read at any time by any thread.
KVR_API const volatile int64_t *kvr_progress(const kvr_model *model);

// Pieces of a step, for tests and benchmarks.
// x [rows, in] -> out [rows, out], both float32, by one matrix of a layer: KVR_Q is all of q, k and
// v with their biases, KVR_GATE gives silu(gate) * up; or by KVR_HEAD (also of a tied model).
KVR_API int32_t kvr_linear(kvr_model *model, int32_t slot, int32_t layer, const float *x,
                           int32_t rows, float *out);
// qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> mix [tokens, heads * head_dim], both float32:
// rotate, write keys and values into the pool, attend. Token ids and logits are not used.
KVR_API int32_t kvr_attention(kvr_model *model, const kvr_step_args *args, int32_t layer,
                              const float *qkv, float *mix);
// The draws of args from the given logits, a row for each; tokens, tables and the pool are not used.
KVR_API int32_t kvr_draw_rows(kvr_model *model, const kvr_step_args *args);
// Nanoseconds that the caller's thread spent in each phase since the model was made:
// matrix products, attention (with rope and KV write), all else.
KVR_API void kvr_times(const kvr_model *model, int64_t *three);
