//! The functions of the CUDA driver that suspend and resume a process, from another process.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::time::Duration;

/// The state of a process by the driver (`CUprocessState` of cuda.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessState {
    /// `CU_PROCESS_STATE_RUNNING`.
    Running,
    /// `CU_PROCESS_STATE_LOCKED`: its calls of CUDA wait.
    Locked,
    /// `CU_PROCESS_STATE_CHECKPOINTED`: it has no GPU memory.
    Suspended,
    /// `CU_PROCESS_STATE_FAILED`: the driver cannot restore it.
    Failed,
}

/// An error of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CheckpointError(pub(crate) i32);

impl CheckpointError {
    const OUT_OF_MEMORY: i32 = 2;
    const NOT_INITIALIZED: i32 = 3;
    const NO_DEVICE: i32 = 100;
    const OPERATING_SYSTEM: i32 = 304;
    pub(super) const ILLEGAL_STATE: i32 = 401;
    const NOT_READY: i32 = 600;
    const NOT_PERMITTED: i32 = 800;
    const NOT_SUPPORTED: i32 = 801;

    /// The meaning of the error in these functions, as seen with driver 580, with its `CUresult`.
    pub(crate) fn text(self) -> String {
        let meaning = match self.0 {
            Self::OUT_OF_MEMORY => "there is not enough memory",
            Self::NOT_INITIALIZED => "the process does not use CUDA",
            Self::NO_DEVICE => "there is no GPU",
            Self::OPERATING_SYSTEM => "the process is gone or belongs to another user",
            Self::ILLEGAL_STATE => "the process is in another state",
            Self::NOT_READY => "work on the GPU did not end in time",
            Self::NOT_PERMITTED => "the driver does not permit it",
            Self::NOT_SUPPORTED => {
                "the process uses what the driver cannot save, such as managed memory or memory of other processes"
            }
            _ => "the driver refused",
        };
        format!("{meaning} (CUDA error {})", self.0)
    }
}

/// The driver's functions for one process at a time.
pub(crate) trait CheckpointDriver {
    /// The state of a process. An error if it does not use CUDA.
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError>;
    /// Waits until the work on the GPU has ended, at most this long, and lets further calls wait.
    fn lock(&self, pid: u32, timeout: Duration) -> Result<(), CheckpointError>;
    /// Copies the GPU memory of a locked process to the host and gives it back.
    fn save(&self, pid: u32) -> Result<(), CheckpointError>;
    /// Brings the GPU memory of a saved process back. It is locked then.
    fn restore(&self, pid: u32) -> Result<(), CheckpointError>;
    /// Lets a locked process go on.
    fn unlock(&self, pid: u32) -> Result<(), CheckpointError>;
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetState = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
type Change = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;

/// `CUcheckpointLockArgs`. The other argument structures have 64 bytes too, all of them reserved.
#[repr(C)]
struct LockArguments {
    timeout_ms: c_uint,
    reserved: c_uint,
    more: [u64; 7],
}

/// The machine's driver.
#[derive(Debug)]
pub(crate) struct CudaDriver {
    get_state: GetState,
    lock: Change,
    save: Change,
    restore: Change,
    unlock: Change,
}

/// Why there is no [`CudaDriver`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoDriver {
    /// `libcuda.so.1` cannot be loaded.
    Missing,
    /// It does not have these functions.
    TooOld,
    /// It cannot be initialized.
    Failed(CheckpointError),
}

impl CudaDriver {
    /// Loads and initializes the driver. It stays loaded: a process is restored while some process has it initialized.
    pub(crate) fn load() -> Result<CudaDriver, NoDriver> {
        // SAFETY: the name is a C string. The library is never unloaded.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(NoDriver::Missing);
        }
        let find = |name: &CStr| {
            // SAFETY: the library is loaded, and the name is a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() { Err(NoDriver::TooOld) } else { Ok(found) }
        };
        // SAFETY: the types are those of cuda.h: CUresult cuInit(unsigned int),
        // CUresult cuCheckpointProcessGetState(int, CUprocessState *), and for each other function
        // CUresult f(int, struct *), whose pointer may be null except for the time limit of the lock.
        let (init, driver) = unsafe {
            let change = |name| find(name).map(|found| std::mem::transmute::<*mut c_void, Change>(found));
            let driver = CudaDriver {
                get_state: std::mem::transmute::<*mut c_void, GetState>(find(c"cuCheckpointProcessGetState")?),
                lock: change(c"cuCheckpointProcessLock")?,
                save: change(c"cuCheckpointProcessCheckpoint")?,
                restore: change(c"cuCheckpointProcessRestore")?,
                unlock: change(c"cuCheckpointProcessUnlock")?,
            };
            (std::mem::transmute::<*mut c_void, Init>(find(c"cuInit")?), driver)
        };
        // SAFETY: the argument must be 0.
        match unsafe { init(0) } {
            0 => Ok(driver),
            error => Err(NoDriver::Failed(CheckpointError(error))),
        }
    }

    fn change(&self, function: Change, pid: u32) -> Result<(), CheckpointError> {
        let mut arguments = [0u64; 8];
        // SAFETY: the structure has 64 reserved bytes, which must be zero.
        result(unsafe { function(id(pid)?, arguments.as_mut_ptr().cast()) })
    }
}

fn id(pid: u32) -> Result<c_int, CheckpointError> {
    c_int::try_from(pid).map_err(|_| CheckpointError(CheckpointError::OPERATING_SYSTEM))
}

fn result(code: c_int) -> Result<(), CheckpointError> {
    if code == 0 { Ok(()) } else { Err(CheckpointError(code)) }
}

impl CheckpointDriver for CudaDriver {
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
        let mut state = -1;
        // SAFETY: the driver writes one integer.
        result(unsafe { (self.get_state)(id(pid)?, &mut state) })?;
        Ok(match state {
            0 => ProcessState::Running,
            1 => ProcessState::Locked,
            2 => ProcessState::Suspended,
            _ => ProcessState::Failed,
        })
    }

    fn lock(&self, pid: u32, timeout: Duration) -> Result<(), CheckpointError> {
        // 0 means no limit.
        let timeout_ms = c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX).max(1);
        let mut arguments = LockArguments { timeout_ms, reserved: 0, more: [0; 7] };
        // SAFETY: the structure is that of cuda.h.
        result(unsafe { (self.lock)(id(pid)?, (&raw mut arguments).cast()) })
    }

    fn save(&self, pid: u32) -> Result<(), CheckpointError> {
        self.change(self.save, pid)
    }

    fn restore(&self, pid: u32) -> Result<(), CheckpointError> {
        self.change(self.restore, pid)
    }

    fn unlock(&self, pid: u32) -> Result<(), CheckpointError> {
        self.change(self.unlock, pid)
    }
}
