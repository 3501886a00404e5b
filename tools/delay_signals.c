// Delays SIGINT and SIGTERM by up to DELAY_SIGNALS_MS milliseconds, at random: before a process that handles one hears of it, and before
// a process sends one. tools/stress_tests.py builds this and has every process of a test load it (LD_PRELOAD).

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

typedef void (*handler_t)(int, siginfo_t *, void *);
static handler_t real_handler[65];

static int is_delayed(int signum) { return signum == SIGINT || signum == SIGTERM; }

static void wait_a_while(void) {
    int error = errno;
    const char *limit = getenv("DELAY_SIGNALS_MS");
    struct timespec now, rest;
    clock_gettime(CLOCK_MONOTONIC, &now);
    unsigned long long x = now.tv_nsec * 6364136223846793005ULL + 1442695040888963407ULL;
    long ms = (long)((x >> 33) % (unsigned long)(limit ? atol(limit) + 1 : 1));
    rest.tv_sec = ms / 1000, rest.tv_nsec = ms % 1000 * 1000000L;
    while (nanosleep(&rest, &rest) == -1 && errno == EINTR) {}
    errno = error;
}

static void late(int signum, siginfo_t *info, void *context) {
    wait_a_while();
    if (real_handler[signum]) real_handler[signum](signum, info, context);
}

int sigaction(int signum, const struct sigaction *new_action, struct sigaction *old_action) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real) real = dlsym(RTLD_NEXT, "sigaction");
    handler_t before = is_delayed(signum) ? real_handler[signum] : NULL;
    struct sigaction wrapped;
    if (new_action && is_delayed(signum) && new_action->sa_handler != SIG_DFL && new_action->sa_handler != SIG_IGN) {
        wrapped = *new_action;
        real_handler[signum] = wrapped.sa_sigaction;  // called with three arguments, of which an old-style handler takes the first
        wrapped.sa_sigaction = late;
        wrapped.sa_flags |= SA_SIGINFO;
        new_action = &wrapped;
    }
    int result = real(signum, new_action, old_action);
    if (old_action && is_delayed(signum) && old_action->sa_sigaction == late) old_action->sa_sigaction = before;
    return result;
}

int kill(pid_t pid, int signum) {
    static int (*real)(pid_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "kill");
    if (is_delayed(signum)) wait_a_while();
    return real(pid, signum);
}

int killpg(pid_t group, int signum) {
    static int (*real)(pid_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "killpg");
    if (is_delayed(signum)) wait_a_while();
    return real(group, signum);
}
