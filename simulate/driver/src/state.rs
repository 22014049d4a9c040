//! The machine behind its lock, and the current context of each thread.

use crate::injection::reported;
use simcuda::config::{Config, Log};
use simcuda::error::{Error, Result, code_of};
use simcuda::ledger::{Call, Layer};
use simcuda::machine::Machine;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
    let machine = Machine::new(Config::from_env());
    if machine.config.log >= Log::Summary {
        // SAFETY: `summary` is an `extern "C"` function without arguments, in a library that is never unloaded.
        unsafe { libc::atexit(summary) };
    }
    Mutex::new(machine)
});

/// The machine, locked for one call.
pub(crate) struct Locked(MutexGuard<'static, Machine>);

impl Deref for Locked {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.0
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Machine {
        &mut self.0
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if let Some(gate) = &self.0.gate {
            let now = CLOCK.load(Ordering::Relaxed);
            gate.leave(self.0.devices.iter().any(|device| device.busy_until > now));
        }
    }
}

/// The machine, locked. Waits while another process has suspended this one.
pub(crate) fn machine() -> Locked {
    let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gate) = &mut machine.gate {
        gate.enter();
    }
    Locked(machine)
}

/// The settings that the checkpoint functions need: the folder that processes share, and the capacity of each device.
/// They are for other processes, so they do not wait for this one.
pub(crate) fn shared_devices() -> Option<(PathBuf, u64)> {
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    Some((machine.config.shared.clone()?, machine.config.memory_bytes))
}

extern "C" fn summary() {
    let m = machine();
    eprintln!("simcuda: {} launches", m.launches);
    for (i, d) in m.devices.iter().enumerate() {
        eprintln!("simcuda: device {i}: used {} peak {} of {} bytes", d.used(), d.peak(), d.total());
    }
    for (name, calls) in &m.stubs {
        eprintln!("simcuda: stub {name} x{calls}");
    }
}

/// A context on the stack of a thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Current {
    /// The context's handle.
    pub(crate) context: u64,
    /// The context's device ordinal.
    pub(crate) device: usize,
}

/// A thread's context stack. It has no destructor, because other libraries call CUDA from their thread-exit code.
#[derive(Clone, Copy, Debug)]
struct Stack {
    depth: usize,
    entries: [Current; Stack::DEEPEST],
}

impl Stack {
    const DEEPEST: usize = 16;
    const EMPTY: Stack = Stack { depth: 0, entries: [Current { context: 0, device: 0 }; Self::DEEPEST] };
}

thread_local! {
    static STACK: Cell<Stack> = const { Cell::new(Stack::EMPTY) };
    static RUNTIME_DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// The thread's current context. `None` when the stack is empty.
pub(crate) fn current() -> Option<Current> {
    let stack = STACK.get();
    stack.depth.checked_sub(1).map(|top| stack.entries[top])
}

/// The thread's current device. 0 when no context is current.
pub(crate) fn current_device() -> usize {
    current().map_or(0, |c| c.device)
}

/// The thread's current device. Fails with `InvalidContext` when no context is current.
pub(crate) fn required_device() -> Result<usize> {
    current().map(|c| c.device).ok_or(Error::InvalidContext)
}

/// Replaces the top of the thread's stack. `None` pops it.
pub(crate) fn set_current(top: Option<Current>) {
    let mut stack = STACK.get();
    stack.depth = stack.depth.saturating_sub(1);
    if let Some(top) = top {
        stack.entries[stack.depth] = top;
        stack.depth += 1;
    }
    STACK.set(stack);
}

/// Pushes a context. Fails when the stack is full.
pub(crate) fn push_current(top: Current) -> Result<()> {
    let mut stack = STACK.get();
    let slot = stack.entries.get_mut(stack.depth).ok_or(Error::InvalidValue)?;
    *slot = top;
    stack.depth += 1;
    STACK.set(stack);
    Ok(())
}

/// Records that the thread enters or leaves a function of the runtime.
pub(crate) fn nest(enter: bool) {
    let depth = RUNTIME_DEPTH.get();
    RUNTIME_DEPTH.set(if enter { depth + 1 } else { depth.saturating_sub(1) });
}

/// The time of the monotonic clock in nanoseconds, for the ledger.
pub(crate) fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a `timespec` on this stack frame that is valid for writes.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The virtual time that the program needs from one call about a stream to the next, in nanoseconds.
const CALL_NS: u64 = 2_000;

/// The virtual clock: the time up to which the program itself has come, in nanoseconds.
static CLOCK: AtomicU64 = AtomicU64::new(0);

/// The virtual time of this call. It advances only by calls and waits, so it is the same on an idle and on a busy
/// machine.
pub(crate) fn now_ns() -> u64 {
    CLOCK.fetch_add(CALL_NS, Ordering::Relaxed) + CALL_NS
}

/// Advances the virtual clock to a point of the timeline, in nanoseconds.
pub(crate) fn wait_until(then: u64) {
    CLOCK.fetch_max(then, Ordering::Relaxed);
}

/// Waits for the device until a point of the virtual timeline and trims the pools, as the synchronizing calls do.
pub(crate) fn synchronize(then: u64) {
    wait_until(then);
    machine().synchronized();
}

/// CUDA's number for a result.
pub(crate) fn code(result: Result<()>) -> i32 {
    code_of(&result)
}

/// Whether a call takes memory or returns it. Only calls that take memory fail on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Allocates, registers, reserves or maps.
    Take,
    /// Frees.
    Give,
}

/// Serves an allocation or a free: fails it on demand or does the work, then writes the ledger line.
///
/// `work` fills in the fields that are known only afterwards.
pub(crate) fn recorded(purpose: Purpose, call: Call, work: impl FnOnce(&mut Machine, &mut Call) -> Result<()>) -> i32 {
    reported(call.api, || serve(purpose, call, work))
}

fn serve(purpose: Purpose, mut call: Call, work: impl FnOnce(&mut Machine, &mut Call) -> Result<()>) -> i32 {
    let machine: &mut Machine = &mut machine();
    let struck = purpose == Purpose::Take && machine.config.faults.strikes(call.api, true);
    let result = if struck { Err(Error::OutOfMemory) } else { work(machine, &mut call) };
    let code = code(result);
    let number = machine.ledger.number();
    if machine.ledger.is_on() {
        let fields = call.fields(Layer::Driver, RUNTIME_DEPTH.get() > 0, code);
        machine.ledger.append(number, monotonic_ns(), &fields);
    }
    code
}
