//! Finds the CUDA devices that a program can use here. A short-lived child process asks the driver, so that the
//! launcher never loads it.

use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// How long the driver may take to answer.
const TIMEOUT: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// The maximum length of the child's answer, in bytes.
const MAX_ANSWER_SIZE: u64 = 64 * 1024;

/// A CUDA device that a program can use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Device {
    /// Its product name.
    pub(crate) name: String,
    /// Its total memory in bytes.
    pub(crate) memory: u64,
}

/// The state of the CUDA driver, as a query shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DriverState {
    /// There is no NVIDIA driver.
    NoDriver,
    /// `CUDA_VISIBLE_DEVICES` hides every device.
    Hidden,
    /// There is a driver, but `libcuda.so.1` cannot be loaded.
    NoLibrary,
    /// The driver returned this `CUresult` as an error.
    Failed(i32),
    /// The driver did not answer in time.
    TimedOut,
    /// The usable devices. The list may be empty.
    Devices(Vec<Device>),
}

/// Whether a CUDA device is certainly usable. `false` also means that this is unknown.
///
/// Must be called while this process has one thread.
pub(crate) fn is_usable() -> bool {
    matches!(query(), DriverState::Devices(devices) if !devices.is_empty())
}

/// Whether this machine has an NVIDIA driver. Loads nothing.
pub(crate) fn has_driver() -> bool {
    ["/dev/nvidiactl", "/proc/driver/nvidia/version"].iter().any(|path| Path::new(path).exists())
}

/// Asks the driver which devices a program can use here.
///
/// Must be called while this process has one thread.
pub(crate) fn query() -> DriverState {
    if !has_driver() {
        return DriverState::NoDriver;
    }
    // The driver follows the same rule: an empty or negative first entry hides every device.
    if std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|v| v.is_empty() || v.trim_start().starts_with('-')) {
        return DriverState::Hidden;
    }
    query_in_child().map_or(DriverState::TimedOut, |text| decode(&text))
}

/// Forks a child that loads the driver, and returns its answer. `None` when no answer comes in time.
fn query_in_child() -> Option<String> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).ok()?;
    // SAFETY: the process has one thread, which the callers of [`query`] guarantee. No lock can therefore be held in
    // the child, and it may call any function.
    let child = match unsafe { libc::fork() } {
        0 => answer_and_exit(&writer),
        -1 => return None,
        child => Pid::from_raw(child)?,
    };
    drop(writer);
    let mut answer = String::new();
    let answered = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&TIMEOUT)) == Ok(1)
        && File::from(reader).take(MAX_ANSWER_SIZE).read_to_string(&mut answer).is_ok();
    let _ = kill_process(child, Signal::KILL);
    let _ = waitpid(Some(child), WaitOptions::empty());
    answered.then_some(answer)
}

/// Writes the answer, in the child.
fn answer_and_exit(writer: &OwnedFd) -> ! {
    // The driver's own output is not for the user.
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = (dup2_stdin(&null), dup2_stdout(&null), dup2_stderr(&null));
    }
    // SAFETY: this process ends right after the call.
    let answer = encode(unsafe { devices() });
    let _ = rustix::io::write(writer, answer.as_bytes());
    // SAFETY: `_exit` takes an integer and does not return. The exit handlers of the copied parent must not run here.
    unsafe { libc::_exit(0) }
}

/// Encodes the child's answer as text, with one line for each device.
fn encode(answer: DriverState) -> String {
    match answer {
        DriverState::NoDriver | DriverState::Hidden | DriverState::TimedOut => String::new(),
        DriverState::NoLibrary => "none\n".to_owned(),
        DriverState::Failed(code) => format!("failed {code}\n"),
        DriverState::Devices(devices) => {
            let lines = devices.iter().map(|d| format!("device {} {}\n", d.memory, d.name.replace('\n', " ")));
            std::iter::once("devices\n".to_owned()).chain(lines).collect()
        }
    }
}

fn decode(text: &str) -> DriverState {
    let mut lines = text.lines();
    match lines.next().map(|l| l.split_once(' ').unwrap_or((l, ""))) {
        Some(("none", _)) => DriverState::NoLibrary,
        Some(("failed", code)) => DriverState::Failed(code.parse().unwrap_or(-1)),
        Some(("devices", _)) => {
            let device = |line: &str| {
                let (memory, name) = line.strip_prefix("device ")?.split_once(' ')?;
                Some(Device { name: name.to_owned(), memory: memory.parse().ok()? })
            };
            DriverState::Devices(lines.filter_map(device).collect())
        }
        _ => DriverState::TimedOut,
    }
}

/// Asks the driver in this process.
///
/// # Safety
/// The process must end right after the call, because the driver stays loaded.
unsafe fn devices() -> DriverState {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type Number = unsafe extern "C" fn(*mut i32) -> i32;
    type Get = unsafe extern "C" fn(*mut i32, i32) -> i32;
    type Name = unsafe extern "C" fn(*mut c_char, i32, i32) -> i32;
    type Memory = unsafe extern "C" fn(*mut usize, i32) -> i32;
    // SAFETY: the function types are those of cuda.h:
    // CUresult cuInit(unsigned), cuDeviceGetCount(int*), cuDeviceGet(CUdevice*, int),
    // cuDeviceGetName(char*, int, CUdevice), cuDeviceTotalMem_v2(size_t*, CUdevice).
    // `dlsym` results are checked for null. All pointers refer to locals of sufficient size, and the library is never
    // unloaded.
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if driver.is_null() {
            return DriverState::NoLibrary;
        }
        let find = |name: &CStr| Some(libc::dlsym(driver, name.as_ptr())).filter(|p| !p.is_null());
        let (Some(init), Some(count)) = (find(c"cuInit"), find(c"cuDeviceGetCount")) else {
            return DriverState::NoLibrary;
        };
        let init = std::mem::transmute::<*mut c_void, Init>(init);
        let number = std::mem::transmute::<*mut c_void, Number>(count);
        let mut devices = 0;
        let result = match init(0) {
            0 => number(&mut devices),
            error => error,
        };
        if result != 0 {
            return DriverState::Failed(result);
        }
        let (Some(get), Some(name), Some(memory)) =
            (find(c"cuDeviceGet"), find(c"cuDeviceGetName"), find(c"cuDeviceTotalMem_v2"))
        else {
            return DriverState::NoLibrary;
        };
        let get = std::mem::transmute::<*mut c_void, Get>(get);
        let name = std::mem::transmute::<*mut c_void, Name>(name);
        let memory = std::mem::transmute::<*mut c_void, Memory>(memory);
        let describe = |ordinal| {
            let (mut device, mut text, mut total) = (0, [0u8; 256], 0usize);
            if get(&mut device, ordinal) == 0 {
                // If a call fails, its output keeps the initial zeros.
                let _ = (name(text.as_mut_ptr().cast(), 255, device), memory(&mut total, device));
            }
            let name = CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned();
            Device { name, memory: total as u64 }
        };
        DriverState::Devices((0..devices.clamp(0, 256)).map(describe).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_survive_encoding() {
        let device = |name: &str, memory| Device { name: name.into(), memory };
        let devices = vec![device("NVIDIA H200", 150_000_000_000), device("", 0)];
        for answer in [
            DriverState::NoLibrary,
            DriverState::Failed(803),
            DriverState::Devices(vec![]),
            DriverState::Devices(devices),
            DriverState::TimedOut,
        ] {
            assert_eq!(decode(&encode(answer.clone())), answer);
        }
        assert_eq!(decode("nonsense"), DriverState::TimedOut);
    }
}
