// Renews a lease while its process rests: the same bytes sent, the same answer expected.
//
// A process that wakes from idle pays for every page of code and data that it touches; this loop
// touches few, and needs neither the interpreter nor its lock.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL  // not everywhere; Python ignores SIGPIPE anyway
#define MSG_NOSIGNAL 0
#endif

namespace {

enum Outcome : int { STIRRED = 0, ANSWERED = 1, BROKEN = 2 };

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

// Whether `fd` became ready, or `stop` did: then false, as after `wait_ns`.
bool ready(int fd, short events, int stop, int64_t wait_ns, bool *stopped) {
    pollfd both[2] = {{stop, POLLIN, 0}, {fd, events, 0}};
    const int64_t end = now_ns() + wait_ns;
    for (;;) {
        const int64_t left = end - now_ns();
        // Rounded up: a wait that ends early would be a second one.
        const int count = poll(both, 2, left > 0 ? int((left + 999999) / 1000000) : 0);
        if (count < 0 && errno == EINTR) continue;
        *stopped = count > 0 && both[0].revents;
        return count > 0 && !*stopped;
    }
}

// Sends all and reads one line into `answer`; its length, or -1.
ptrdiff_t ask(int fd, int stop, const char *line, size_t length, int64_t timeout_ns, char *answer,
              size_t room) {
    bool stopped;
    while (length > 0) {
        const ssize_t sent = send(fd, line, length, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return -1;
        if (sent < 0 && !ready(fd, POLLOUT, stop, timeout_ns, &stopped)) return -1;
        if (sent > 0) line += sent, length -= size_t(sent);
    }
    size_t got = 0;
    do {
        if (!ready(fd, POLLIN, stop, timeout_ns, &stopped)) return -1;
        const ssize_t more = recv(fd, answer + got, room - got, MSG_DONTWAIT);
        if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (more <= 0) return -1;
        got += size_t(more);
    } while (got < 2 || answer[got - 1] != '\n');
    return ptrdiff_t(got);
}

}  // namespace

// Returns when `*turns` is not `turn`, when `stop` can be read, when the answer is another than
// `usual`, or when the connection fails or is in the middle of an exchange (BROKEN: close it).
// `*renewed_ns` is the beginning of the last attempt that had the usual answer.
extern "C" __attribute__((visibility("default"))) int kvrelay_rest(
    int fd, int stop, const char *renewal, const char *usual, const volatile int64_t *turns,
    int64_t turn, int64_t period_ns, int64_t timeout_ns, int64_t *renewed_ns, int64_t length) {
    const size_t expected = strlen(usual);
    char answer[256];
    for (;;) {
        bool stopped;
        ready(-1, 0, stop, period_ns - now_ns() % period_ns, &stopped);
        if (stopped || *turns != turn) return STIRRED;
        const int64_t started_ns = now_ns();
        const ptrdiff_t got =
            ask(fd, stop, renewal, size_t(length), timeout_ns, answer, sizeof answer);
        if (got < 0) return BROKEN;
        if (size_t(got) != expected || memcmp(answer, usual, expected)) return ANSWERED;
        *renewed_ns = started_ns;
    }
}
