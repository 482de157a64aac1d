// A model's memory: its weights, packed once, and what a step needs beside them.

#pragma once

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "model.h"

namespace kvr {

// Asks for large pages in whatever whole pages lie in [at, at + bytes); nothing else changes.
inline void want_large_pages(void *at, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t LARGE = 2 << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(at) + LARGE - 1) / LARGE * LARGE;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + bytes) / LARGE * LARGE;
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
#else
    (void)at, (void)bytes;
#endif
}

// Zeroed memory in large pages where the system has them: weights are read from end to end.
class Region {
  public:
    Region() = default;
    Region(const Region &) = delete;
    ~Region() { release(); }

    bool reserve(size_t bytes) {
        release();
        void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) return false;
        want_large_pages(at, bytes);
        at_ = static_cast<char *>(at);
        bytes_ = bytes;
        return true;
    }
    char *at() const { return at_; }

  private:
    void release() {
        if (at_) munmap(at_, bytes_);
        at_ = nullptr;
    }
    char *at_ = nullptr;
    size_t bytes_ = 0;
};

// Hands out pieces of a region; from null it only counts.
struct Cursor {
    char *base;
    size_t used = 0;
    template <class P> void take(P *&field, size_t bytes) {
        field = base ? reinterpret_cast<P *>(base + used) : nullptr;
        used += (bytes + 63) / 64 * 64;
    }
};

struct Model {
    Model(const kvr_config &config, Run of, int threads)
        : c(config), item(config.dtype == KVR_BFLOAT16 ? 2 : 4), run(of), crew(threads),
          layers(config.layers), rows_set(size_t(config.layers) * KVR_ROPE) {}

    const kvr_config c;
    const size_t item;  // bytes of one weight
    const Run run;
    Crew crew, lone{1};
    std::vector<Layer> layers;
    std::vector<int64_t> rows_set;  // of each matrix in turn, while its rows arrive: see set
    Matrix embed{}, head{};
    float *norm = nullptr;
    const float *rope = nullptr;
    int64_t rope_positions = 0;
    Region weights, memory, packed;
    Scratch scratch{};
    int64_t room_tokens = 0, room_places = 0;
    std::vector<PackItem> packs;
    std::vector<AttentionItem> items;
    std::vector<Wave> waves;
    std::vector<int> row_tokens;
    const void *seen_pool = nullptr;
    int64_t progress = 0, times[3] = {};

    int group() const { return c.heads / c.kv_heads; }
    size_t block_bytes() const {
        return size_t(c.layers) * 2 * c.kv_heads * c.block_size * c.head_dim * item;
    }
    int qkv_rows() const { return (c.heads + 2 * c.kv_heads) * c.head_dim; }

    void matrix(Cursor &cursor, Matrix &m, int rows, int columns) {
        m.depth = padded(columns);
        m.width = rows;
        cursor.take(m.data, size_t(padded(rows)) * m.depth * item);
    }

    size_t lay_out_weights(char *base) {
        Cursor cursor{base};
        const auto vector = [&](float *&field, int width) {
            cursor.take(field, size_t(padded(width)) * sizeof(float));
        };
        matrix(cursor, embed, c.vocab, c.hidden);
        if (!c.tied) matrix(cursor, head, c.vocab, c.hidden);
        vector(norm, c.hidden);
        for (Layer &layer : layers) {
            vector(layer.attention_norm, c.hidden);
            vector(layer.mlp_norm, c.hidden);
            vector(layer.qkv_bias, qkv_rows());
            vector(layer.q_norm, c.head_dim);
            vector(layer.k_norm, c.head_dim);
            matrix(cursor, layer.qkv, qkv_rows(), c.hidden);
            matrix(cursor, layer.attention_out, c.hidden, c.heads * c.head_dim);
            const int gate_panels = (c.intermediate + PANEL - 1) / PANEL;
            matrix(cursor, layer.gate_up, 2 * gate_panels * PANEL, c.hidden);
            matrix(cursor, layer.down, c.hidden, c.intermediate);
        }
        if (c.tied) head = embed;
        return cursor.used;
    }

    size_t lay_out_scratch(char *base, int64_t tokens) {
        Cursor cursor{base};
        Scratch &s = scratch;
        const size_t rows = tokens + SPARE_ROWS;
        const int most = padded(group() > MOST_QUERIES ? group() : MOST_QUERIES);
        const size_t wide = padded(c.head_dim);
        cursor.take(s.x, rows * padded(c.hidden) * 4);
        s.own_normed_bytes = size_t(FEW_ROWS) * padded(c.hidden) * item;
        const size_t normed_bytes = rows * padded(c.hidden) * item;
        const size_t own_bytes = crew.members * s.own_normed_bytes;
        cursor.take(s.normed, normed_bytes > own_bytes ? normed_bytes : own_bytes);
        cursor.take(s.qkv, rows * padded(qkv_rows()) * 4);
        cursor.take(s.q, (tokens * c.heads + SPARE_ROWS) * wide * item);
        cursor.take(s.mix, rows * padded(c.heads * c.head_dim) * item);
        cursor.take(s.gated, rows * padded(c.intermediate) * item);
        cursor.take(s.position, rows * sizeof(int));
        cursor.take(s.slot, rows * sizeof(int64_t));
        s.attention_bytes = 4 * (QUERY_ROWS * KEY_TILE + most * (wide + 18) +
                                 wide * (2 * KEY_TILE + COPIED_KEYS + 1)) + 4096;
        cursor.take(s.attention, s.attention_bytes * crew.members);
        return cursor.used;
    }

    bool ensure_room(int64_t tokens) {
        if (tokens <= room_tokens) return true;
        room_tokens = 0;
        if (!memory.reserve(lay_out_scratch(nullptr, tokens))) return false;
        lay_out_scratch(memory.at(), tokens);
        room_tokens = tokens;
        return true;
    }

    int64_t place_bytes() const { return 2 * KEY_TILE * padded(c.head_dim) * int64_t(item); }

    bool ensure_places(int64_t places) {
        if (places <= room_places) return true;
        room_places = 0;
        if (!packed.reserve(places * place_bytes())) return false;
        room_places = places;
        return true;
    }

    // Row `row` of the packed matrix. Words: one float, or two neighbouring bf16.
    void pack_row(const Matrix &m, int64_t row, const char *from, int64_t columns) const {
        const int per_word = int(4 / item);
        char *to = static_cast<char *>(m.data) +
                   (row / PANEL * m.depth * PANEL + row % PANEL * per_word) * int64_t(item);
        const int64_t words = columns / per_word;
        for (int64_t word = 0; word < words; ++word)
            std::memcpy(to + word * PANEL * 4, from + word * 4, 4);
        if (columns % per_word) std::memcpy(to + words * PANEL * 4, from + words * 4, item);
    }

    // Packs values [rows, columns] as rows first... of `m`; gate (0) and up (1) alternate by panel.
    void pack(const Matrix &m, const void *values, int64_t rows, int64_t columns, int64_t first,
              int alternate) const {
        const char *from = static_cast<const char *>(values);
        for (int64_t row = first; row < first + rows; ++row, from += columns * item) {
            const int64_t pair = row / PANEL * 2 + alternate;
            pack_row(m, alternate < 0 ? row : pair * PANEL + row % PANEL, from, columns);
        }
    }

    // One tensor, or the next rows of a matrix, whose rows may come in several calls. Threads may
    // set different tensors at once.
    int32_t set(int32_t slot, int32_t number, const void *values, int64_t rows, int64_t columns);
    int32_t check(const kvr_step_args &args) const;
    int32_t plan(const kvr_step_args &args);
    int64_t share_attention(const kvr_step_args &args);
    Job job(const kvr_step_args &args);
};

}  // namespace kvr

struct kvr_model final : kvr::Model {
    using Model::Model;
};
