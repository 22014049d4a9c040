//! The memory that PyTorch's allocator has in use when memtrace attaches.
//!
//! The allocator lists it ([`snapshot`]), or `torch.cuda.memory_snapshot()` where the layout of that list is not known.
//! The call records an event under each device's lock, which marks the point of the device's state among its events
//! ([`gate`]). A thread of its own takes the snapshot, because the events of memory that Python's garbage collector
//! frees meanwhile must not come before the state in the same ring.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memtrace_trace::api::Api;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::shm::layout::FIRST_LIVE_SEQ;

use super::thread::{set_name, start};
use crate::cpython::api::{self, PyObjectPtr};
use crate::cpython::gil::{GilToken, PyOwned, with_gil};
use crate::recording::bounded_wait::BoundedWait;
use crate::recording::device_use;
use crate::recording::guard::Guard;
use crate::recording::paused::set_detached;
use crate::torch::snapshot::{self, Block, Segment};
use crate::torch::{gate, tracker};

/// How long to wait for the GIL and the snapshot.
const LIMIT: Duration = Duration::from_secs(15);

/// The state of all devices.
#[derive(Default)]
pub(super) struct PriorState {
    segments: Vec<Segment>,
    /// When the snapshot began, in units of [`memtrace_trace::clock`].
    ticks: u64,
    /// How long taking it has needed.
    took: Duration,
    /// Why Python has listed the blocks, which held the GIL. `None` if the allocator itself has.
    python: Option<&'static str>,
}

type Result<T> = std::result::Result<T, &'static str>;

/// The reader's progress: 0 it has not begun, 1 it has, 2 nobody waits for it any more.
static PROGRESS: AtomicU32 = AtomicU32::new(WAITING);
const WAITING: u32 = 0;
const READING: u32 = 1;
const ABANDONED: u32 = 2;
/// The reader's result, a box.
static RESULT: AtomicPtr<Result<PriorState>> = AtomicPtr::new(null_mut());

/// Reads the state. Recording begins when the GIL is there, and without the state where there is none.
pub(super) fn take() -> Result<PriorState> {
    PROGRESS.store(WAITING, Ordering::Release);
    // SAFETY: a C string.
    if !unsafe { libc::getenv(c"PYTORCH_NO_CUDA_MEMORY_CACHING".as_ptr()) }.is_null() {
        set_detached(false);
        gate::open();
        return Err("PYTORCH_NO_CUDA_MEMORY_CACHING is set, so PyTorch does not know its blocks");
    }
    if !start(reader) {
        gate::open();
        return Err("no thread can be started");
    }
    let mut wait = BoundedWait::new(LIMIT);
    let result = loop {
        let result = RESULT.swap(null_mut(), Ordering::AcqRel);
        if !result.is_null() {
            // SAFETY: the reader has made this box, and the exchange gives it to this thread alone.
            break *unsafe { Box::from_raw(result) };
        }
        let has_begun = || PROGRESS.compare_exchange(WAITING, ABANDONED, Ordering::AcqRel, Ordering::Acquire).is_err();
        if !wait.pause() {
            if !has_begun() {
                break Err("Python has not released the GIL");
            }
            // A snapshot that has begun ends.
            let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            // SAFETY: `time` is valid, and a null pointer discards the remaining time.
            unsafe { libc::nanosleep(&time, null_mut()) };
        }
    };
    gate::open();
    result
}

/// The thread that reads the state: from the allocator itself, or through Python if its layout is not known.
extern "C" fn reader(_: *mut c_void) -> *mut c_void {
    set_name(c"memtrace-state");
    let reason = match from_allocator() {
        Ok(state) => {
            RESULT.store(Box::into_raw(Box::new(Ok(state))), Ordering::Release);
            return null_mut();
        }
        Err(reason) => reason,
    };
    let begin = || PROGRESS.compare_exchange(WAITING, READING, Ordering::AcqRel, Ordering::Acquire).is_ok();
    let result = api::find()
        .and_then(|api| with_gil(api, |gil| if begin() { Some(from_python(gil, reason)) } else { None }))
        .unwrap_or_else(|| if begin() { Some(Err("there is no CPython with a GIL that runs")) } else { None });
    if let Some(result) = result {
        RESULT.store(Box::into_raw(Box::new(result)), Ordering::Release);
    }
    null_mut()
}

/// Asks PyTorch's allocator for its blocks.
fn from_allocator() -> Result<PriorState> {
    if !snapshot::is_initialized()? {
        set_detached(false);
        return Ok(PriorState::default());
    }
    device_use::set();
    snapshot::take(false)?;
    // From here on events are recorded, except those of PyTorch's allocator, for which the gate is closed.
    set_detached(false);
    tracker::attach();
    if !tracker::is_attached() {
        return Err("the tracker cannot be attached to PyTorch's allocator");
    }
    let began = Instant::now();
    let segments = snapshot::take(true)?;
    Ok(PriorState { segments, ticks: gate::snapshot_began(), took: began.elapsed(), python: None })
}

/// Lets Python list the blocks, because of this `reason`.
fn from_python(gil: GilToken<'_>, reason: &'static str) -> Result<PriorState> {
    let began = Instant::now();
    let function = |name: &CStr| gil.module_attribute(c"torch.cuda", name);
    let is_initialized = function(c"is_initialized")
        .and_then(|function| gil.call(function.object, &[]))
        .is_some_and(|value| gil.as_int(value.object) == 1);
    set_detached(false);
    if !is_initialized {
        return Ok(PriorState::default());
    }
    device_use::set();
    let snapshot = function(c"memory_snapshot").ok_or("PyTorch has no torch.cuda.memory_snapshot")?;
    tracker::attach();
    if !tracker::is_attached() {
        return Err("the tracker cannot be attached to PyTorch's allocator");
    }
    let list = gate::while_taking_snapshot(|| gil.call(snapshot.object, &[])).ok_or(reason)?;
    let mut state = PriorState { ticks: gate::snapshot_began(), ..PriorState::default() };
    let keys = Keys::new(gil).ok_or("no memory is left")?;
    for segment in gil.elements(list.object) {
        keys.read(gil, segment, &mut state);
    }
    drop(list);
    (state.took, state.python) = (began.elapsed(), Some(reason));
    Ok(state)
}

/// The keys of a snapshot's dictionaries.
struct Keys<'a> {
    device: PyOwned<'a>,
    address: PyOwned<'a>,
    total_size: PyOwned<'a>,
    stream: PyOwned<'a>,
    pool: PyOwned<'a>,
    is_expandable: PyOwned<'a>,
    blocks: PyOwned<'a>,
    size: PyOwned<'a>,
    requested_size: PyOwned<'a>,
    state: PyOwned<'a>,
}

impl<'a> Keys<'a> {
    fn new(gil: GilToken<'a>) -> Option<Keys<'a>> {
        Some(Keys {
            device: gil.interned(c"device")?,
            address: gil.interned(c"address")?,
            total_size: gil.interned(c"total_size")?,
            stream: gil.interned(c"stream")?,
            pool: gil.interned(c"segment_pool_id")?,
            is_expandable: gil.interned(c"is_expandable")?,
            blocks: gil.interned(c"blocks")?,
            size: gil.interned(c"size")?,
            requested_size: gil.interned(c"requested_size")?,
            state: gil.interned(c"state")?,
        })
    }

    /// Reads a segment with its blocks.
    fn read(&self, gil: GilToken<'_>, segment: PyObjectPtr, state: &mut PriorState) {
        let number = |dict, key| gil.item(dict, key).map(|value| gil.as_address(value));
        let Some((addr, size)) = number(segment, &self.address).zip(number(segment, &self.total_size)) else { return };
        let pool = gil.item(segment, &self.pool).and_then(|pool| {
            let part = |at| gil.tuple_item(pool, at).map(|part| gil.as_address(part));
            part(0).zip(part(1))
        });
        let mut in_use = Vec::new();
        let mut at = addr;
        for block in gil.item(segment, &self.blocks).into_iter().flat_map(|blocks| gil.elements(blocks)) {
            let Some(size) = number(block, &self.size) else { continue };
            let addr = number(block, &self.address).unwrap_or(at);
            at = addr.saturating_add(size);
            let is_pending = match gil.item(block, &self.state).and_then(|text| gil.str(text)) {
                Some("active_allocated") => false,
                Some("active_pending_free" | "active_awaiting_free") => true,
                _ => continue,
            };
            let requested = number(block, &self.requested_size).unwrap_or(size);
            in_use.push(Block { addr, size, requested, is_pending });
        }
        state.segments.push(Segment {
            device: number(segment, &self.device).unwrap_or(0) as i16,
            addr,
            size,
            stream: number(segment, &self.stream).unwrap_or(0),
            pool: pool.unwrap_or((0, 0)),
            is_expandable: number(segment, &self.is_expandable) == Some(1),
            blocks: in_use,
        });
    }
}

/// Writes the events that recreate the state. Returns their number.
pub(super) fn write(guard: &mut Guard, state: &PriorState) -> u64 {
    tracker::report_verified(guard);
    let mut written = 0;
    for segment in &state.segments {
        let pool = tracker::pool_id(guard, segment.pool);
        let event = Event {
            ticks: state.ticks,
            stream: segment.stream,
            source: Source::Torch,
            device: segment.device,
            flags: Flags::PREEXISTING,
            pool,
            ..Event::EMPTY
        };
        let mut emit = |event: Event| {
            let seq = written + 1;
            if seq < FIRST_LIVE_SEQ && guard.emit_prior(Event { seq, ..event }) {
                written = seq;
            }
        };
        if !segment.is_expandable {
            // The allocator has got it from CUDA, by this function unless its pool has an allocator of its own.
            emit(Event {
                addr: segment.addr,
                size: segment.size,
                action: Action::Alloc,
                source: Source::Runtime,
                api: Api::cudaMalloc,
                flags: event.flags.with(Flags::IN_ALLOCATOR),
                pool: 0,
                stream: 0,
                ..event
            });
        }
        let action = if segment.is_expandable { Action::SegmentMap } else { Action::SegmentAlloc };
        emit(Event { addr: segment.addr, size: segment.size, action, ..event });
        for block in &segment.blocks {
            let of_block = Event { addr: block.addr, size: block.requested, ..event };
            let slack = block.size.checked_sub(block.requested).and_then(|slack| u32::try_from(slack).ok());
            let flags = if slack.is_some() { event.flags.with(Flags::SLACK_KNOWN) } else { event.flags };
            emit(Event { action: Action::Alloc, flags, slack: slack.unwrap_or(0), ..of_block });
            if block.is_pending {
                emit(Event { action: Action::FreeRequested, ..of_block });
            }
        }
    }
    written
}

/// The devices with the bytes that PyTorch has reserved.
pub(super) fn reserved(state: &PriorState) -> BTreeMap<i16, u64> {
    let mut devices: BTreeMap<i16, u64> = BTreeMap::new();
    for segment in &state.segments {
        *devices.entry(segment.device).or_default() += segment.size;
    }
    devices
}

/// The notices about the state.
pub(super) fn notices(state: &PriorState) -> Vec<(NoticeStatus, String)> {
    let mut devices: BTreeMap<i16, u64> = BTreeMap::new();
    for segment in &state.segments {
        *devices.entry(segment.device).or_default() += segment.blocks.iter().map(|block| block.size).sum::<u64>();
    }
    let blocks: usize = state.segments.iter().map(|segment| segment.blocks.len()).sum();
    let (segments, milliseconds) = (state.segments.len(), state.took.as_secs_f64() * 1e3);
    let who = match state.python {
        None => "PyTorch's allocator listed them".to_owned(),
        Some(reason) => format!("torch.cuda.memory_snapshot() listed them, and Python waited ({reason}),"),
    };
    let text = format!(
        "{blocks} blocks in {segments} segments were in use before memtrace attached; {who} in {milliseconds:.1} ms"
    );
    let mut notices = vec![(NoticeStatus::Works, text)];
    for (device, bytes) in devices {
        // An independent figure: PyTorch has counted these bytes under the device's lock.
        if gate::active(device) != Some(bytes) {
            let text = format!(
                "the memory of GPU {device} that was in use before memtrace attached is not complete: its blocks have \
                 {bytes} bytes"
            );
            notices.push((NoticeStatus::Off, text));
        }
    }
    notices
}
