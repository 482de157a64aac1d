// The C ABI: chooses the variant, and hands steps and pieces of steps to it.

#include <memory>
#include <new>

#include "store.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace kvr;

namespace {

bool amx_allowed() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

Run run_of(int32_t variant) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bf16");
    if (variant == KVR_AMX)
        return avx512 && __builtin_cpu_supports("amx-bf16") && amx_allowed() ? kvr_run_amx
                                                                             : nullptr;
    if (variant == KVR_AVX512BF16) return avx512 ? kvr_run_avx512bf16 : nullptr;
    if (variant == KVR_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kvr_run_avx2
                                                                               : nullptr;
#endif
    return variant == KVR_PORTABLE ? kvr_run_portable : nullptr;
}

// To the nearest bfloat16, ties to even.
uint16_t round_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Between a caller's dense float32 rows and a step's padded rows of `item` bytes per element.
struct Rows {
    void *at;
    int64_t stride;
    size_t item;

    void put(int64_t row, const float *from, int width) const {
        char *to = static_cast<char *>(at) + row * stride * item;
        for (int k = 0; k < width; ++k) {
            const uint16_t half = round_bf16(from[k]);
            const void *value = item == 4 ? static_cast<const void *>(from + k) : &half;
            std::memcpy(to + k * item, value, item);
        }
    }
    void get(int64_t row, float *to, int width) const {
        const char *from = static_cast<const char *>(at) + row * stride * item;
        for (int k = 0; k < width; ++k) {
            char bits[4] = {};  // a bfloat16 is the upper half of a float
            std::memcpy(bits + 4 - item, from + k * item, item);
            std::memcpy(to + k, bits, 4);
        }
    }
};

struct Ends {
    Rows input, output;
    int in, out;
};

// Where a step has the input and the output of one matrix.
Ends ends_of(const Model &m, int32_t slot) {
    const kvr_config &c = m.c;
    const Scratch &s = m.scratch;
    const int mixed = c.heads * c.head_dim;
    const Rows normed{s.normed, padded(c.hidden), m.item}, x{s.x, padded(c.hidden), 4};
    const Rows mix{s.mix, padded(mixed), m.item}, gated{s.gated, padded(c.intermediate), m.item};
    switch (slot) {
    case KVR_Q: return {normed, {s.qkv, padded(m.qkv_rows()), 4}, c.hidden, m.qkv_rows()};
    case KVR_ATTENTION_OUT: return {mix, x, mixed, c.hidden};
    case KVR_GATE: return {normed, gated, c.hidden, c.intermediate};
    case KVR_DOWN: return {gated, x, c.intermediate, c.hidden};
    default: return {normed, {nullptr, 0, 4}, c.hidden, c.vocab};
    }
}

int64_t draw_bytes_of(const Model &m) { return m.crew.members * draw_bytes(m.c.vocab); }

int32_t check_draws(const Model &m, const kvr_step_args &a) {
    if (!a.draws) return KVR_OK;
    if (a.draw_memory_bytes < draw_bytes_of(m) || (a.wanted && a.logit_rows < 1))
        return KVR_BAD_DRAW;
    for (int row = 0; row < a.wanted; ++row) {
        const kvr_draw &d = a.draws[row];
        if (d.limit < 0 || d.limit > m.c.vocab || d.banned_at < 0 || d.banned < 0 ||
            int64_t(d.banned_at) + d.banned > a.all_banned || d.given >= d.limit ||
            d.tops > KVR_MOST_TOPS || (d.tops >= 0 && !a.told))
            return KVR_BAD_DRAW;
    }
    return KVR_OK;
}

void run_piece(Model &model, Job &job, Piece piece, int32_t layer) {
    job.piece = piece;
    job.layer = layer;
    model.crew.run(model.run, &job);
}

}  // namespace

int32_t kvr_abi() { return KVR_ABI; }

int32_t kvr_has_variant(int32_t variant) { return run_of(variant) != nullptr; }

kvr_model *kvr_create(const kvr_config *config, int32_t variant, int32_t threads) {
    const Run run = run_of(variant);
    if (!run || config->head_dim > MOST_HEAD_DIM || config->head_dim % 2) return nullptr;
    std::unique_ptr<kvr_model> model(new (std::nothrow) kvr_model(*config, run, threads));
    if (!model || !model->weights.reserve(model->lay_out_weights(nullptr))) return nullptr;
    model->lay_out_weights(model->weights.at());
    return model.release();
}

void kvr_destroy(kvr_model *model) { delete model; }

int32_t kvr_set(kvr_model *model, int32_t slot, int32_t layer, const void *values, int64_t rows,
                int64_t columns) {
    return model->set(slot, layer, values, rows, columns);
}

int32_t kvr_step(kvr_model *model, const kvr_step_args *args) {
    if (const int32_t status = check_draws(*model, *args)) return status;
    if (const int32_t status = model->plan(*args)) return status;
    Job job = model->job(*args);
    job.crew->run(model->run, &job);
    return KVR_OK;
}

int64_t kvr_draw_memory(const kvr_model *model) { return draw_bytes_of(*model); }

int32_t kvr_draw_rows(kvr_model *model, const kvr_step_args *args) {
    if (!args->draws || args->logit_rows < args->wanted) return KVR_BAD_DRAW;
    if (const int32_t status = check_draws(*model, *args)) return status;
    Job job = model->job(*args);
    run_piece(*model, job, Piece::DRAW, 0);
    return KVR_OK;
}

const volatile int64_t *kvr_progress(const kvr_model *model) { return &model->progress; }

void kvr_times(const kvr_model *model, int64_t *three) {
    std::memcpy(three, model->times, sizeof model->times);
}

int32_t kvr_linear(kvr_model *model, int32_t slot, int32_t layer, const float *x, int32_t rows,
                   float *out) {
    if (layer < 0 || layer >= model->c.layers) return KVR_BAD_SHAPE;
    if (!model->ensure_room(rows)) return KVR_NO_MEMORY;
    const Ends ends = ends_of(*model, slot);
    for (int row = 0; row < rows; ++row) {
        ends.input.put(row, x + int64_t(row) * ends.in, ends.in);
        if (slot == KVR_ATTENTION_OUT || slot == KVR_DOWN)  // they add to the residual stream
            std::memset(model->scratch.x + row * ends.output.stride, 0, ends.out * sizeof(float));
    }
    kvr_step_args args{};
    args.tokens = rows;
    args.logits = out;
    Job job = model->job(args);
    job.slot = slot;
    run_piece(*model, job, Piece::PRODUCT, layer);
    for (int row = 0; ends.output.at && row < rows; ++row)
        ends.output.get(row, out + int64_t(row) * ends.out, ends.out);
    return KVR_OK;
}

int32_t kvr_attention(kvr_model *model, const kvr_step_args *args, int32_t layer, const float *qkv,
                      float *mix) {
    if (layer < 0 || layer >= model->c.layers) return KVR_BAD_SHAPE;
    if (const int32_t status = model->plan(*args)) return status;
    const Rows input = ends_of(*model, KVR_Q).output;
    const Rows output = ends_of(*model, KVR_ATTENTION_OUT).input;
    const int wide = model->qkv_rows(), mixed = model->c.heads * model->c.head_dim;
    for (int t = 0; t < args->tokens; ++t) input.put(t, qkv + int64_t(t) * wide, wide);
    Job job = model->job(*args);
    run_piece(*model, job, Piece::ATTENTION, layer);
    for (int t = 0; t < args->tokens; ++t) output.get(t, mix + int64_t(t) * mixed, mixed);
    return KVR_OK;
}
