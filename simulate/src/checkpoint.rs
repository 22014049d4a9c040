//! CUDA's checkpoint functions: other processes stop a process's calls, take its device memory away and give it back.
//!
//! Each process that uses CUDA has a page in the folder that processes share (`SIMCUDA_SHARED`). The process itself
//! waits at the page before each call. Other processes change the state there, and move the memory that the process
//! uses out of [`SharedUsage`] and back. The contents of memory stay where they are, in the host's memory.

use crate::config::MAX_DEVICES;
use crate::error::{Error, Result};
use crate::shared::{SharedUsage, started};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time between two looks at a process that is to stop.
const PAUSE: Duration = Duration::from_millis(1);

/// The states, with the numbers of `CUprocessState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Calls are served.
    Running = 0,
    /// Calls wait.
    Locked = 1,
    /// Calls wait, and the process uses no device memory.
    Checkpointed = 2,
}

/// An obstacle to a checkpoint, as a bit of [`Words::obstacles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Obstacle {
    /// The process shares memory by CUDA IPC.
    Ipc = 1,
}

/// The content of the page.
#[repr(C)]
struct Words {
    /// When the process started, in clock ticks. 0 until the page is complete.
    started: AtomicU64,
    /// A [`State`].
    state: AtomicU32,
    /// The number of calls in progress.
    calls: AtomicU32,
    /// 1 while work on a device is not finished.
    busy: AtomicU32,
    /// Bits of [`Obstacle`].
    obstacles: AtomicU32,
    /// The bytes that the process used on each device before its checkpoint, by physical ordinal.
    saved: [AtomicU64; MAX_DEVICES],
}

/// A mapped page.
#[derive(Debug)]
struct Page(NonNull<Words>);

// SAFETY: all fields are atomic, and the mapping stays until the value is dropped.
unsafe impl Send for Page {}

impl Page {
    fn map(file: &File) -> io::Result<Page> {
        file.set_len(size_of::<Words>() as u64)?;
        // SAFETY: the kernel chooses the address of a new mapping of a file that is long enough.
        let address = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), size_of::<Words>(), access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(address.cast()).map(Page).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    fn words(&self) -> &Words {
        // SAFETY: the mapping has the size of `Words`, whose fields may have any value, and lives as long as `self`.
        unsafe { self.0.as_ref() }
    }

    /// Stores a state, and wakes the calls that wait for it.
    fn set(&self, state: State) {
        let word = &self.words().state;
        word.store(state as u32, Ordering::SeqCst);
        // SAFETY: the address is that of a mapped word.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map` made, and nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Words>()) };
    }
}

fn path(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("process-{pid}"))
}

/// The page of this process, at which its calls wait.
#[derive(Debug)]
pub struct Gate {
    folder: PathBuf,
    /// The process of the page. It differs in a forked child.
    pid: u32,
    page: Page,
}

impl Gate {
    /// Makes the page of this process. `None` if the folder cannot be used.
    pub fn new(folder: &Path) -> Option<Gate> {
        let pid = std::process::id();
        let mut options = File::options();
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path(folder, pid)).ok()?;
        let page = Page::map(&file).ok()?;
        // The file may be that of an earlier process with this id.
        let words = page.words();
        words.started.store(0, Ordering::SeqCst);
        [&words.state, &words.calls, &words.busy, &words.obstacles].iter().for_each(|w| w.store(0, Ordering::SeqCst));
        words.saved.iter().for_each(|bytes| bytes.store(0, Ordering::SeqCst));
        words.started.store(started(pid).unwrap_or(0), Ordering::SeqCst);
        Some(Gate { folder: folder.to_owned(), pid, page })
    }

    /// Begins a call. Waits while the process is not running.
    pub fn enter(&mut self) {
        if self.pid != std::process::id()
            && let Some(own) = Gate::new(&self.folder)
        {
            *self = own;
        }
        let words = self.page.words();
        loop {
            words.calls.fetch_add(1, Ordering::SeqCst);
            let state = words.state.load(Ordering::SeqCst);
            if state == State::Running as u32 {
                return;
            }
            words.calls.fetch_sub(1, Ordering::SeqCst);
            // SAFETY: the address is that of a mapped word. Without a timeout the last argument is null.
            unsafe {
                let no_timeout = ptr::null::<libc::timespec>();
                libc::syscall(libc::SYS_futex, words.state.as_ptr(), libc::FUTEX_WAIT, state, no_timeout);
            }
        }
    }

    /// Ends a call. `is_busy` says whether work on a device is not finished.
    pub fn leave(&self, is_busy: bool) {
        let words = self.page.words();
        words.busy.store(u32::from(is_busy), Ordering::SeqCst);
        words.calls.fetch_sub(1, Ordering::SeqCst);
    }

    /// Notes what will prevent a checkpoint of this process.
    pub fn add(&self, obstacle: Obstacle) {
        self.page.words().obstacles.fetch_or(obstacle as u32, Ordering::SeqCst);
    }
}

/// A process that uses CUDA, as another process sees it.
#[derive(Debug)]
pub struct Remote {
    page: Page,
    usage: SharedUsage,
}

impl Remote {
    /// The process with this id.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] if it does not use CUDA, [`Error::NotPermitted`] if it is another user's.
    pub fn open(folder: &Path, pid: u32) -> Result<Remote> {
        let file = File::options().read(true).write(true).open(path(folder, pid)).map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => Error::NotPermitted,
            _ => Error::InvalidValue,
        })?;
        let page = Page::map(&file).map_err(|_| Error::InvalidValue)?;
        let is_its = started(pid) == Some(page.words().started.load(Ordering::SeqCst));
        if is_its { Ok(Remote { page, usage: SharedUsage::of_process(folder, pid) }) } else { Err(Error::InvalidValue) }
    }

    /// Its state.
    pub fn state(&self) -> State {
        match self.page.words().state.load(Ordering::SeqCst) {
            1 => State::Locked,
            2 => State::Checkpointed,
            _ => State::Running,
        }
    }

    fn require(&self, state: State) -> Result<()> {
        if self.state() == state { Ok(()) } else { Err(Error::IllegalState) }
    }

    /// Stops its calls, and waits for those in progress and for the work on devices. A `timeout` of 0 is none.
    ///
    /// # Errors
    ///
    /// [`Error::IllegalState`] unless it runs, [`Error::NotReady`] when the time has passed. It then runs on.
    pub fn lock(&self, timeout: Duration) -> Result<()> {
        self.require(State::Running)?;
        self.page.set(State::Locked);
        let (words, begun) = (self.page.words(), Instant::now());
        while words.calls.load(Ordering::SeqCst) + words.busy.load(Ordering::SeqCst) > 0 {
            if !timeout.is_zero() && begun.elapsed() >= timeout {
                self.page.set(State::Running);
                return Err(Error::NotReady);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Releases its device memory, which a restore gives back.
    ///
    /// # Errors
    ///
    /// [`Error::IllegalState`] unless it is locked, [`Error::NotSupported`] for what cannot be restored.
    pub fn checkpoint(&mut self) -> Result<()> {
        self.require(State::Locked)?;
        if self.page.words().obstacles.load(Ordering::SeqCst) != 0 {
            return Err(Error::NotSupported);
        }
        let used = self.usage.take_away().map_err(|_| Error::OutOfMemory)?;
        for (to, bytes) in self.page.words().saved.iter().zip(used) {
            to.store(bytes, Ordering::SeqCst);
        }
        self.page.set(State::Checkpointed);
        Ok(())
    }

    /// Gives its device memory back. The process stays locked. Each device has `capacity` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::IllegalState`] unless it is checkpointed, [`Error::OutOfMemory`] if other processes use its memory. It
    /// then stays checkpointed.
    pub fn restore(&mut self, capacity: u64) -> Result<()> {
        self.require(State::Checkpointed)?;
        let saved: Vec<u64> = self.page.words().saved.iter().map(|bytes| bytes.load(Ordering::SeqCst)).collect();
        for (device, bytes) in saved.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
            let taken = self.usage.take(device as u32, bytes, capacity);
            if taken.map_err(|_| Error::OutOfMemory).flatten().is_err() {
                self.usage.take_away().ok();
                return Err(Error::OutOfMemory);
            }
        }
        self.page.set(State::Locked);
        Ok(())
    }

    /// Lets its calls go on.
    ///
    /// # Errors
    ///
    /// [`Error::IllegalState`] unless it is locked.
    pub fn unlock(&self) -> Result<()> {
        self.require(State::Locked)?;
        self.page.set(State::Running);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_each_other_and_calls_wait() {
        let folder = std::env::temp_dir().join(format!("simcuda-checkpoint-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (pid, mut usage) = (std::process::id(), SharedUsage::new(&folder));
        assert_eq!(Remote::open(&folder, pid).unwrap_err(), Error::InvalidValue, "no call yet");
        let mut gate = Gate::new(&folder).unwrap();
        gate.enter();
        let mut remote = Remote::open(&folder, pid).unwrap();
        let limit = Duration::from_millis(20);
        assert_eq!(remote.lock(limit), Err(Error::NotReady), "a call is in progress");
        gate.leave(true);
        assert_eq!(remote.lock(limit), Err(Error::NotReady), "work is in progress");
        gate.enter();
        gate.leave(false);
        assert_eq!(usage.take(1, 60, 100).unwrap(), Ok(()));
        assert_eq!(remote.checkpoint(), Err(Error::IllegalState));
        assert_eq!(remote.lock(limit), Ok(()));
        assert_eq!(remote.lock(limit), Err(Error::IllegalState));
        let call = std::thread::spawn(move || {
            gate.enter();
            gate.leave(false);
            gate
        });
        assert_eq!(remote.checkpoint(), Ok(()));
        assert_eq!(usage.of_device(1).unwrap(), []);
        assert_eq!(remote.unlock(), Err(Error::IllegalState));
        // Too much of the device is in use.
        assert_eq!(remote.restore(59), Err(Error::OutOfMemory));
        assert_eq!((remote.state(), usage.of_device(1).unwrap()), (State::Checkpointed, vec![]));
        assert_eq!(remote.restore(100), Ok(()));
        assert_eq!(usage.of_device(1).unwrap(), [(pid, 60)]);
        assert!(!call.is_finished());
        assert_eq!(remote.unlock(), Ok(()));
        let gate = call.join().unwrap();
        gate.add(Obstacle::Ipc);
        assert_eq!(remote.lock(limit), Ok(()));
        assert_eq!((remote.checkpoint(), remote.unlock()), (Err(Error::NotSupported), Ok(())));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
