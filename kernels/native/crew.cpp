#include "crew.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>

#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace kvr {
namespace {

// As the caller's own thread has in a worker: what is short and waited for goes first.
constexpr int COMPUTE_NICE = 5;

// About 20 us: longer than a phase is uneven on idle cores, and little lost on busy ones.
constexpr int SPINS = 300;

// Who waits looks so long after it began to whether the others are at work, and again after as
// long; then less often.
constexpr std::chrono::microseconds LOOK{200}, LATER_LOOK{2000};
// Who worked for less than this since the last look has no processor.
constexpr int64_t AT_WORK_NS = 10000;

int this_thread() {
#if defined(__linux__)
    return int(syscall(SYS_gettid));
#else
    return 0;
#endif
}

#if defined(__linux__)
// How long a thread of this process has had a processor so far; the clock's number is the kernel's.
int64_t worked_ns(int thread) {
    timespec t{};
    clock_gettime(clockid_t((~unsigned(thread) << 3) | 6), &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Queues a thread that waits for a processor on this one, which is about to be free.
void bring_here(int thread) {
    cpu_set_t allowed, here;
    const int cpu = sched_getcpu();
    if (cpu < 0 || sched_getaffinity(thread, sizeof allowed, &allowed) != 0) return;
    if (!CPU_ISSET(cpu, &allowed)) return;
    CPU_ZERO(&here);
    CPU_SET(cpu, &here);
    if (sched_setaffinity(thread, sizeof here, &here) == 0)
        sched_setaffinity(thread, sizeof allowed, &allowed);
}
#endif

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Crew::Crew(int wanted) : members(wanted < 1 ? 1 : wanted), shares_(members), seen_(members) {
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
        seen_[0].thread = this_thread();
        ++runs_;
    }
    begun_.notify_all();
    work(job, 0);
    meet(0);
}

void Crew::serve(int member) {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, this_thread(), COMPUTE_NICE);
#endif
    uint64_t seen = 0;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        seen_[member].thread = this_thread();
    }
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
        meet(member);
    }
}

void Crew::meet(int member) {
    const uint32_t generation = __atomic_load_n(&generation_, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&seen_[member].meetings, 1, __ATOMIC_RELAXED);
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
    wait(member, generation);
}

void Crew::wait(int member, uint32_t generation) {
    const auto over = [&] { return __atomic_load_n(&generation_, __ATOMIC_SEQ_CST) != generation; };
    std::unique_lock<std::mutex> lock(mutex_);
    __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
    for (int looks = 0; !met_.wait_for(lock, looks < 2 ? LOOK : LATER_LOOK, over); ++looks)
        fetch_missing(seen_[member].meetings);
    __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
}

// With the lock. A member in whose place another program runs is all that this phase waits for,
// while the processor of who waits has nothing to do; the system may see that only milliseconds
// later. So a member that has not worked since the last look is brought here.
void Crew::fetch_missing(uint32_t meeting) {
#if defined(__linux__)
    for (Seen &other : seen_) {
        if (__atomic_load_n(&other.meetings, __ATOMIC_RELAXED) == meeting || !other.thread) continue;
        const int64_t now_ns = worked_ns(other.thread);
        if (now_ns - other.worked_ns < AT_WORK_NS) bring_here(other.thread);
        other.worked_ns = now_ns;
    }
#else
    (void)meeting;
#endif
}

}  // namespace kvr
