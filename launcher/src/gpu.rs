//! Whether a CUDA device can be used here. Asked in a short-lived process, so that no driver is ever loaded into this one.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// How long the driver may take to answer.
const PATIENCE_MS: libc::c_int = 3000;

/// Whether a CUDA device is usable for certain. `false` also means "cannot tell".
///
/// Must be called while this process has one thread.
pub(crate) fn is_usable() -> bool {
    let driver = ["/dev/nvidiactl", "/proc/driver/nvidia/version"].iter().any(|p| Path::new(p).exists());
    // The driver's own rule: an empty or negative first entry hides every device.
    let hidden = std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|v| v.is_empty() || v.trim_start().starts_with('-'));
    driver && !hidden && probe()
}

fn probe() -> bool {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: room for two descriptors, which are new and ours. With one thread, the child of fork may do anything.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return false;
        }
        let (reader, writer) = (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]));
        let child = libc::fork();
        if child == 0 {
            // Whatever the driver prints is not for the user.
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            for fd in 0..3 {
                libc::dup2(null, fd);
            }
            let answer = u8::from(has_device());
            libc::write(writer.as_raw_fd(), (&raw const answer).cast(), 1);
            libc::_exit(0);
        }
        drop(writer);
        if child < 0 {
            return false;
        }
        let mut answer = 0u8;
        let mut poll = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let answered = libc::poll(&mut poll, 1, PATIENCE_MS) == 1
            && libc::read(reader.as_raw_fd(), (&raw mut answer).cast(), 1) == 1;
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        answered && answer == 1
    }
}

/// # Safety
/// For a process that ends right after: the driver stays loaded.
unsafe fn has_device() -> bool {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type Count = unsafe extern "C" fn(*mut i32) -> i32;
    // SAFETY: the names and types are those of cuda.h: CUresult cuInit(unsigned), CUresult cuDeviceGetCount(int*).
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if driver.is_null() {
            return false;
        }
        let find = |name: &CStr| Some(libc::dlsym(driver, name.as_ptr())).filter(|p| !p.is_null());
        let (Some(init), Some(count)) = (find(c"cuInit"), find(c"cuDeviceGetCount")) else { return false };
        let init = std::mem::transmute::<*mut libc::c_void, Init>(init);
        let count = std::mem::transmute::<*mut libc::c_void, Count>(count);
        let mut devices = 0;
        init(0) == 0 && count(&mut devices) == 0 && devices > 0
    }
}
