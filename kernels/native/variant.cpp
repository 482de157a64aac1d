// One step, compiled once for each kind of processor. VARIANT names the entry point.
//
// The residual stream, the sums of products and the softmax are float32 in both dtypes. In bfloat16
// only what a product reads is rounded: normed rows, queries, keys, values, softmax weights, the
// mix of values, and the gated activation. That rounds less often than a model kept in bfloat16
// throughout, and is nearer to the float32 result.

#include "direct.h"
#include "product.h"
#include "sampling.h"

#include <time.h>

namespace {

using kvr::Job;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Adds the time since the last mark to one of kvr_times; member 0's view stands for all.
struct Watch {
    int64_t *times;
    int64_t mark = 0;
    void start() {
        if (times) mark = now_ns();
    }
    void spent(int on) {
        if (!times) return;
        const int64_t now = now_ns();
        times[on] += now - mark;
        mark = now;
    }
};
enum { PRODUCTS, ATTENTION, REST };

template <class T> struct Step {
    Job &job;
    kvr::Crew &crew;
    const kvr_config &c;
    const int member, tokens;
    Watch watch;

    template <class Do> void each(int count, Do work) {
        for (int item; (item = crew.take(member, count)) >= 0;) work(item);
        crew.meet(member);
    }

    // Rows are shared in fours: one row alone is too little work to fetch.
    template <class Do> void each_row(int rows, Do work) {
        each((rows + 3) / 4, [&](int four) {
            for (int row = four * 4; row < rows && row < four * 4 + 4; ++row) work(row);
        });
    }

    // Gives rows `of(0)` ... `of(rows - 1)` of x, normed; also where every member has its own copy.
    template <class Of> const void *norm(int rows, const float *weight, Of of) {
        const int wide = padded(c.hidden);
        T *out = static_cast<T *>(job.s.normed);
        const auto one = [&](int row) {
            rms_norm(job.s.x + int64_t(of(row)) * wide, weight, c.hidden, c.rms_eps,
                     out + int64_t(row) * wide);
        };
        if (rows <= kvr::FEW_ROWS) {
            out += member * (job.s.own_normed_bytes / sizeof(T));
            for (int row = 0; row < rows; ++row) one(row);
        } else {
            each_row(rows, one);
        }
        watch.spent(REST);
        return out;
    }

    const void *norm(const float *weight) {
        return norm(tokens, weight, [](int row) { return row; });
    }

    void multiply(const void *a, const kvr::Matrix &w, Then then, const float *bias, void *out,
                  ptrdiff_t ldo) {
        product<T>(crew, member, Product{a, w.depth, tokens, w, then, bias, out, ldo});
        watch.spent(PRODUCTS);
    }

    // A lone query tile of a request rotates and writes for itself; of many, each needs all keys.
    void attention(int layer) {
        if (!job.one_item_each)
            each_row(tokens, [&](int t) {
                for (int h = 0; h < c.kv_heads; ++h) rope_write<T>(job, layer, t, h);
            });
        const int wide = padded(c.head_dim), group = c.heads / c.kv_heads;
        const int most = padded(group > kvr::MOST_QUERIES ? group : kvr::MOST_QUERIES);
        const Workspace<T> work(job.s.attention + member * job.s.attention_bytes, most, wide);
        Lookahead<T, kvr::PackItem> packs(job, layer, job.packs, job.pack_count);
        Lookahead<T, kvr::AttentionItem> items(job, layer, job.items, job.item_count);
        kvr::Wave done{0, 0};
        for (int number = 0; number < job.wave_count; ++number) {
            const kvr::Wave wave = job.waves[number];
            if (wave.packs_end > done.packs_end)
                each(wave.packs_end - done.packs_end, [&](int at) {
                    packs.begin(done.packs_end + at);
                    pack_shared<T>(job, layer, job.packs[done.packs_end + at], work, packs);
                });
            each(wave.items_end - done.items_end, [&](int at) {
                items.begin(done.items_end + at);
                const kvr::AttentionItem &item = job.items[done.items_end + at];
                const int first = job.row_tokens[item.row];
                for (int t = 0; job.one_item_each && t < item.count; ++t)
                    rope_write<T>(job, layer, first + t, item.head);
                attend<T>(job, layer, item, first, work, items);
            });
            done = wave;
        }
        watch.spent(ATTENTION);
    }

    void layer(int number) {
        const kvr::Layer &w = job.layers[number];
        const kvr::Scratch &s = job.s;
        const int wide = padded(c.hidden);
        multiply(norm(w.attention_norm), w.qkv, Then::STORE, w.qkv_bias, s.qkv,
                 padded(w.qkv.width));
        attention(number);
        multiply(s.mix, w.attention_out, Then::ADD, nullptr, s.x, wide);
        multiply(norm(w.mlp_norm), w.gate_up, Then::GATE, nullptr, s.gated,
                 padded(c.intermediate));
        multiply(s.gated, w.down, Then::ADD, nullptr, s.x, wide);
        if (member == 0) __atomic_add_fetch(job.progress, 1, __ATOMIC_RELAXED);
    }

    // Logits of `count` wanted tokens from the `first` on.
    void head(int first, int count) {
        const int *at = job.a.wanted_at + first;
        const void *a = norm(count, job.norm, [at](int row) { return at[row]; });
        product<T>(crew, member, Product{a, padded(c.hidden), count, job.head, Then::STORE, nullptr,
                                 job.a.logits, c.vocab});
        watch.spent(PRODUCTS);
    }

    void all() {
        each_row(tokens, [&](int t) {
            embed<T>(job.embed, job.a.token_ids[t], job.s.x + int64_t(t) * padded(c.hidden));
        });
        watch.spent(REST);
        for (int number = 0; number < c.layers; ++number) layer(number);
        if (job.a.wanted) heads();
    }

    void heads() {
        if (!job.a.draws) return head(0, job.a.wanted);
        for (int first = 0; first < job.a.wanted; first += job.a.logit_rows) {
            const int left = job.a.wanted - first;
            const int count = left < job.a.logit_rows ? left : job.a.logit_rows;
            head(first, count);
            draw(first, count);
            if (member == 0 && count < left) __atomic_add_fetch(job.progress, 1, __ATOMIC_RELAXED);
        }
    }

    void draw(int first, int count) {
        void *work = static_cast<char *>(job.a.draw_memory) + member * kvr::draw_bytes(c.vocab);
        each(count, [&](int row) {
            draw_row(job, first + row, job.a.logits + int64_t(row) * c.vocab, work);
        });
        watch.spent(REST);
    }

    // One matrix alone, between the places where a step has its input and its output.
    void one_product() {
        const kvr::Layer &w = job.layers[job.layer];
        const kvr::Scratch &s = job.s;
        const int wide = padded(c.hidden);
        if (job.slot == KVR_Q)
            multiply(s.normed, w.qkv, Then::STORE, w.qkv_bias, s.qkv, padded(w.qkv.width));
        else if (job.slot == KVR_ATTENTION_OUT)
            multiply(s.mix, w.attention_out, Then::ADD, nullptr, s.x, wide);
        else if (job.slot == KVR_GATE)
            multiply(s.normed, w.gate_up, Then::GATE, nullptr, s.gated, padded(c.intermediate));
        else if (job.slot == KVR_DOWN)
            multiply(s.gated, w.down, Then::ADD, nullptr, s.x, wide);
        else
            multiply(s.normed, job.head, Then::STORE, nullptr, job.a.logits, c.vocab);
    }
};

template <class T> void run(Job &job, int member) {
    Step<T> step{job, *job.crew, job.c, member, job.a.tokens, {member == 0 ? job.times : nullptr}};
    begin_tiles();
    step.watch.start();
    if (job.piece == kvr::Piece::STEP)
        step.all();
    else if (job.piece == kvr::Piece::PRODUCT)
        step.one_product();
    else if (job.piece == kvr::Piece::DRAW)
        step.draw(0, job.a.wanted);
    else
        step.attention(job.layer);
    end_tiles();
}

}  // namespace

extern "C" void VARIANT(void *at, int member) {
    Job &job = *static_cast<Job *>(at);
    if (job.c.dtype == KVR_BFLOAT16)
        run<bf16>(job, member);
    else
        run<float>(job, member);
}
