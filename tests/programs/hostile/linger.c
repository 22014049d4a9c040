// Allocates once and waits long enough to be noticed. `linger seccomp`: behind a filter that refuses sockets.
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

int main(int argc, char **argv) {
    (void)argv;
    if (argc > 1) {
        struct sock_filter code[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof code / sizeof *code, code};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return 70;
    }
    void *memory;
    if (cudaMalloc(&memory, 4096) != 0 || cudaFree(memory) != 0) return 71;
    struct timespec while_ = {1, 0};
    nanosleep(&while_, NULL);
    printf("fine\n");
    return 0;
}
