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

    // The members of a run share the items 0 .. count-1 of a phase; count or more: nothing is left.
    __attribute__((always_inline)) int take() {
        return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    }

    // Ends a phase: no one goes on before all have come. The items start at 0 again.
    void meet();

    const int members;

  private:
    void serve(int member);

    int next_ = 0;
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
