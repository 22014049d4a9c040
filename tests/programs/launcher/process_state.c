/* Prints its own state. The output must be the same with and without memtrace.
 *
 *   state            everything a process inherits
 *   signals          prints "ready", then the number of every signal it gets; SIGUSR2 ends it well
 *   default SIGNAL   prints "ready" and waits, all dispositions as inherited
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <termios.h>
#include <unistd.h>

extern char **environ;

static void state(int argc, char **argv) {
    for (int i = 0; i < argc; i++) printf("argv[%d]=%s\n", i, argv[i]);
    for (char **e = environ; *e; e++)
        if (strncmp(*e, "LD_PRELOAD=", 11) && strncmp(*e, "MEMTRACE_SESSION=", 17) &&
            strncmp(*e, "NVTX_INJECTION64_PATH=", 22))
            printf("env %s\n", *e);
    sigset_t mask;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    for (int s = 1; s < NSIG; s++) {
        struct sigaction a;
        if (sigaction(s, NULL, &a) == 0 && a.sa_handler == SIG_IGN) printf("ignored %d\n", s);
        if (sigismember(&mask, s) == 1) printf("blocked %d\n", s);
    }
    mode_t m = umask(0);
    umask(m);
    printf("umask %o\n", m);
    char cwd[PATH_MAX];
    printf("cwd %s\n", getcwd(cwd, sizeof cwd));
    printf("group is the starter's: %d\n", getpgrp() == getpgid(getppid()) || getpgrp() == getpid());
    printf("session %d\n", getsid(0));
    printf("terminal %d %d %d, foreground %d\n", isatty(0), isatty(1), isatty(2), tcgetpgrp(0) == getpgrp());
    for (int r = 0; r < RLIM_NLIMITS; r++) {
        struct rlimit l;
        if (getrlimit(r, &l) == 0) printf("limit %d %llu %llu\n", r, (unsigned long long)l.rlim_cur, (unsigned long long)l.rlim_max);
    }
    printf("nice %d\n", getpriority(PRIO_PROCESS, 0));
    struct itimerval t;
    getitimer(ITIMER_REAL, &t);
    printf("dumpable and friends: uid %d %d gid %d %d\n", getuid(), geteuid(), getgid(), getegid());
    /* Descriptors by number and kind; the folder being read is one more. */
    DIR *d = opendir("/proc/self/fd");
    char *open_fds[1024] = {0};
    for (struct dirent *e; (e = readdir(d));) {
        int fd = atoi(e->d_name);
        if (e->d_name[0] == '.' || fd == dirfd(d) || fd >= 1024) continue;
        struct stat st;
        char line[64];
        if (fstat(fd, &st) == 0) {
            snprintf(line, sizeof line, "fd %d mode %o", fd, st.st_mode & S_IFMT);
            open_fds[fd] = strdup(line);
        }
    }
    for (int fd = 0; fd < 1024; fd++)
        if (open_fds[fd]) puts(open_fds[fd]);
    closedir(d);
    struct sigaction a;
    errno = 0;
    printf("errno after a bad call: %d\n", close(-1) == -1 ? errno : sigaction(0, NULL, &a));
}

static void print_signal(int s) {
    char line[16];
    int n = snprintf(line, sizeof line, "%d\n", s);
    if (write(1, line, n) != n) _exit(99);
}

static void signals(void) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    if (write(1, "ready\n", 6) != 6) _exit(99);
    for (;;) {
        siginfo_t info;
        int s = sigwaitinfo(&all, &info);
        if (s < 0) continue;
        if (s == SIGTSTP) raise(SIGSTOP);
        print_signal(s);
        if (info.si_code == SI_QUEUE) {
            printf("value %d\n", info.si_value.sival_int);
            fflush(stdout);
        }
        if (s == SIGUSR2) exit(0);
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "state")) {
        state(argc, argv);
    } else if (!strcmp(what, "signals")) {
        signals();
    } else if (!strcmp(what, "default")) {
        if (write(1, "ready\n", 6) != 6) return 99;
        for (;;) pause();
    } else {
        return 2;
    }
    return 0;
}
