// The threads of one model. They sleep between steps, and spin only briefly inside one.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvr {

class Crew {
  public:
    using Work = void (*)(void *job, int member);

    explicit Crew(int members);
    ~Crew();

    // Every member, the caller as member 0, runs `work(job, member)`; returns when all have.
    void run(Work work, void *job);

    // The next item of a phase of `count`, or -1. First those of the member's own share, the same
    // in every step: what it wrote is still in its caches. Then what others have not begun.
    __attribute__((always_inline)) int take(int member, int count) {
        for (int of = member; of < member + members; ++of) {
            const int owner = of < members ? of : of - members;
            Share &share = shares_[owner];
            const int first = int(int64_t(count) * owner / members);
            const int end = int(int64_t(count) * (owner + 1) / members);
            if (__atomic_load_n(&share.begun, __ATOMIC_RELAXED) >= end - first) continue;
            const int item = first + __atomic_fetch_add(&share.begun, 1, __ATOMIC_RELAXED);
            if (item < end) return item;
        }
        return -1;
    }

    // Ends a phase: no one goes on before all have come. No item is begun then.
    void meet(int member);

    const int members;

  private:
    struct alignas(64) Share {
        int begun = 0;
    };
    // What the others know of a member.
    struct Seen {
        int thread = 0;         // the system's number of it; 0 where threads have none
        uint32_t meetings = 0;  // that it has come to
        int64_t worked_ns = 0;  // when one of those who waited last looked
    };

    void serve(int member);
    void wait(int member, uint32_t generation);
    void fetch_missing(uint32_t meeting);

    std::vector<Share> shares_;
    std::vector<Seen> seen_;
    int arrived_ = 0;
    uint32_t generation_ = 0;  // of meetings
    int sleepers_ = 0;
    std::mutex mutex_;
    std::condition_variable met_;

    std::condition_variable begun_;
    uint64_t runs_ = 0;
    bool stopping_ = false;
    Work work_ = nullptr;
    void *job_ = nullptr;
    std::vector<std::thread> threads_;
};

}  // namespace kvr
