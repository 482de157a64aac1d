#include "crew.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvr {
namespace {

// As the caller's own thread has in a worker: what is short and waited for goes first.
constexpr int COMPUTE_NICE = 5;

// About 20 us: longer than a phase is uneven on idle cores, and little lost on busy ones.
constexpr int SPINS = 300;

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Crew::Crew(int wanted) : members(wanted < 1 ? 1 : wanted), shares_(members) {
    for (int member = 1; member < members; ++member)
        threads_.emplace_back([this, member] { serve(member); });
}

Crew::~Crew() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    begun_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void Crew::run(Work work, void *job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        job_ = job;
        ++runs_;
    }
    begun_.notify_all();
    work(job, 0);
    meet();
}

void Crew::serve(int member) {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, pid_t(syscall(SYS_gettid)), COMPUTE_NICE);
#endif
    uint64_t seen = 0;
    for (;;) {
        Work work;
        void *job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            begun_.wait(lock, [&] { return stopping_ || runs_ != seen; });
            if (stopping_) return;
            seen = runs_;
            work = work_;
            job = job_;
        }
        work(job, member);
        meet();
    }
}

void Crew::meet() {
    uint32_t generation = __atomic_load_n(&generation_, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == members) {
        __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
        for (Share &share : shares_) __atomic_store_n(&share.begun, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&generation_, generation + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST) > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // no sleeper is between check and wait
            met_.notify_all();
        }
        return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
        if (__atomic_load_n(&generation_, __ATOMIC_ACQUIRE) != generation) return;
        pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
    met_.wait(lock, [&] { return __atomic_load_n(&generation_, __ATOMIC_SEQ_CST) != generation; });
    __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
}

}  // namespace kvr
