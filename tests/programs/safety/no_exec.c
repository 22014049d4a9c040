// `no_exec COMMAND ARGUMENT...`: runs the command under a filter of system calls. The kernel kills a process of it that
// starts another program, or that makes a socket of any kind.
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIELD(name) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, name))
#define LOW(argument) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[argument]))
#define HIGH(argument) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[argument]) + 4)

int main(int argc, char **argv, char **environment) {
    if (argc < 2) return 2;
    // Only the one `execve` with this program's own address of the command is allowed. The next program has another
    // address space.
    uintptr_t allowed = (uintptr_t)argv[1];
    struct sock_filter code[] = {
        FIELD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 7, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execveat, 6, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 0, 4),
        LOW(0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)allowed, 0, 3),
        HIGH(0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(allowed >> 32), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("no_exec: seccomp");
        return 70;
    }
    execve(argv[1], argv + 1, environment);
    perror("no_exec: execve");
    return 71;
}
