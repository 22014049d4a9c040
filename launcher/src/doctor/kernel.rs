//! Checks the kernel, the C library and the restrictions of a sandbox.

use std::ffi::CStr;

use super::report::Check;

/// A field of `/proc/self/status`. `None` when it is missing.
fn status(field: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Reports the kernel and the C library.
pub(super) fn system() -> Check {
    let uname = rustix::system::uname();
    let kernel = uname.release().to_string_lossy();
    // SAFETY: glibc returns a pointer to a static NUL-terminated string.
    let glibc = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy();
    Check::ok("System", format!("Linux {kernel}, glibc {glibc}, {}", std::env::consts::ARCH))
}

/// Checks that `/proc` is readable. It provides names and command lines for reports and the processes that were not
/// recorded.
pub(super) fn proc() -> Check {
    let readable =
        ["/proc/self/stat", "/proc/self/maps", "/proc/self/cmdline"].iter().all(|p| std::fs::read(p).is_ok());
    if readable {
        Check::ok("/proc", "readable")
    } else {
        let why = "not mounted or hidden, so reports cannot name processes, threads and commands";
        Check::failed("/proc", why, "mount it: mount -t proc proc /proc; in a container, do not mask /proc")
    }
}

/// Checks that a process can read its own memory through the kernel. The recorder verifies layouts that way.
pub(super) fn checked_memory() -> Check {
    let (value, mut read) = (0x5EED_u64, 0u64);
    let size = size_of::<u64>();
    let local = libc::iovec { iov_base: (&raw mut read).cast(), iov_len: size };
    let remote = libc::iovec { iov_base: (&raw const value).cast_mut().cast(), iov_len: size };
    // SAFETY: `local` and `remote` each describe a local variable of `size` bytes. `read` is valid for writes, and both
    // outlive the call.
    let by_call = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if by_call == size as isize && read == value {
        return Check::ok("Memory reads", "process_vm_readv works");
    }
    if std::fs::File::open("/proc/self/mem").is_ok() {
        return Check::ok("Memory reads", "process_vm_readv is forbidden; /proc/self/mem is read instead");
    }
    let why = "process_vm_readv and /proc/self/mem are forbidden, so layouts of Python frames cannot be verified";
    Check::failed("Memory reads", why, "allow process_vm_readv in the sandbox's seccomp profile")
}

/// Reports whether system calls are filtered. This alone needs no fix: other checks report what is missing.
pub(super) fn seccomp() -> Check {
    match status("Seccomp").as_deref() {
        Some("2") => Check::note("seccomp", "system calls are filtered (container or sandbox)"),
        Some("1") => Check::note("seccomp", "strict mode"),
        Some(_) => Check::ok("seccomp", "no filter"),
        None => Check::note("seccomp", "the kernel does not report it"),
    }
}

/// Reports whether one process may trace another. memtrace does not need that, but debuggers do.
pub(super) fn ptrace() -> Check {
    match std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok().as_deref().map(str::trim) {
        Some(scope @ ("2" | "3")) => {
            Check::note("ptrace", format!("restricted (yama ptrace_scope {scope}); memtrace does not need it"))
        }
        Some(scope) => Check::ok("ptrace", format!("yama ptrace_scope {scope}; memtrace does not need it")),
        None => Check::ok("ptrace", "no yama; memtrace does not need it"),
    }
}
