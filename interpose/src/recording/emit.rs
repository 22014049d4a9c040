//! Writes records to the ring: assigns numbers and timestamps and handles a full ring.
//!
//! A full ring means that the launcher is behind. The hook then waits, because events must not be lost. It stops
//! waiting once the launcher has taken nothing from any ring for [`MAX_WAIT`]. Otherwise the traced process would
//! hang with a launcher that is stopped, has ended or waits for a disk. While the launcher makes progress, it serves
//! all rings in turn, this one included. After a failed wait, events are dropped and counted without waiting until
//! there is space again.
//!
//! A sleep may take far longer than requested because the process was stopped together with its launcher. It counts as
//! [`MAX_COUNTED_SLEEP`].
//!
//! Invariant: an event gets its number only once it has space. A dropped event has no number, because the launcher
//! waits for every number that was assigned.

use std::sync::atomic::Ordering;
use std::time::Duration;

use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, MAX_DEFINITION, NoticeStatus};
use memtrace_trace::event::Event;
use memtrace_trace::shm::layout::SegmentHeader;
use memtrace_trace::shm::ring::{Full, Producer};

use super::cancellation::NoCancellation;
use super::process::Process;
use super::{connect, heap, paused};

/// The longest string in a definition, in bytes.
const MAX_STRING: usize = MAX_DEFINITION / 4;
/// How long a hook waits while the launcher makes no progress, and how. After [`SPIN_ATTEMPTS`] attempts it sleeps.
/// Each sleep takes twice as long as the one before, up to [`MAX_SLEEP`].
///
/// A longer sleep would leave a ring empty after the launcher has drained it. With a shorter one (2 ms was measured), a
/// thousand threads would take the processor from the launcher. Every [`LAUNCHER_CHECK_INTERVAL`] the hook checks
/// whether the launcher still exists.
const MAX_WAIT: Duration = Duration::from_secs(2);
const MAX_COUNTED_SLEEP: Duration = Duration::from_millis(100);
const LAUNCHER_CHECK_INTERVAL: Duration = Duration::from_millis(100);
const SPIN_ATTEMPTS: u32 = 200;
const FIRST_SLEEP: Duration = Duration::from_micros(50);
const MAX_SLEEP: Duration = Duration::from_millis(32);

/// Assigns the event's number and, unless PyTorch provided one, its timestamp.
///
/// Call it at the moment that the event describes, under the allocator's lock. Then numbers are in the allocator's
/// order.
#[inline]
pub(crate) fn stamp(process: &Process, event: &mut Event) {
    event.seq = process.segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed);
    if event.ticks == 0 {
        event.ticks = clock::now();
    }
}

/// Waits until the ring has space for an event. Returns `false` if it got none in time; then the event must be dropped
/// and is counted.
#[inline(always)]
pub(crate) fn ensure_room(process: &Process, producer: &mut Producer<'_>) -> bool {
    producer.has_room() || wait_for_room(process, producer)
}

#[cold]
fn wait_for_room(process: &Process, producer: &mut Producer<'_>) -> bool {
    let found = wait_and_retry(process, producer, |p| if p.has_room() { Ok(()) } else { Err(Full) });
    if !found {
        process.count(Counter::EventsDropped, 1);
    }
    found
}

/// Writes and publishes a definition. Counts it as dropped if it is too long or the ring has no space in time.
pub(crate) fn define(process: &Process, producer: &mut Producer<'_>, definition: &Definition<'_>) {
    let mut bytes = Vec::with_capacity(256);
    definition.encode(&mut bytes);
    let written = bytes.len() <= MAX_DEFINITION
        && (producer.write_definition(&bytes).is_ok()
            || wait_and_retry(process, producer, |p| p.write_definition(&bytes)));
    if !written {
        process.count(Counter::DefinitionsDropped, 1);
    }
    // Memory is allocated only for something new, and everything new is defined here. So this function notices
    // that memory has run out.
    if heap::is_exhausted() && paused::end_recording() {
        let text = "the kernel refused more memory, perhaps because of a limit: the recording ends here";
        define(process, producer, &Definition::Notice { topic: "memory", text, status: NoticeStatus::Off });
    }
}

#[cold]
fn wait_and_retry(
    process: &Process,
    producer: &mut Producer<'_>,
    mut attempt: impl FnMut(&mut Producer<'_>) -> Result<(), Full>,
) -> bool {
    producer.publish();
    let header = process.segment.header();
    let closed = &header.closed.0;
    if closed.load(Ordering::Relaxed) != 0 || process.stalled.load(Ordering::Relaxed) != 0 {
        // Tries once without waiting, because the launcher may be draining again.
        let written = attempt(producer).is_ok();
        if written {
            process.stalled.store(0, Ordering::Relaxed);
        }
        return written;
    }
    process.count(Counter::RingWaits, 1);
    let _no_cancellation = NoCancellation::new();
    let since = monotonic();
    let found = sleep_until(header, || attempt(producer).is_ok());
    process.count(Counter::RingWaitMicroseconds, (monotonic().saturating_sub(since)).as_micros() as u64);
    if !found && closed.load(Ordering::Relaxed) == 0 {
        process.stalled.store(1, Ordering::Relaxed);
    }
    found
}

/// Retries `done` until it succeeds. Returns `false` if it did not succeed in time.
fn sleep_until(header: &SegmentHeader, mut done: impl FnMut() -> bool) -> bool {
    for _ in 0..SPIN_ATTEMPTS {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    let (mut sleep, mut waited, mut next_check) = (FIRST_SLEEP, Duration::ZERO, LAUNCHER_CHECK_INTERVAL);
    let (mut now, mut taken) = (monotonic(), header.taken.0.load(Ordering::Relaxed));
    while waited < MAX_WAIT && header.closed.0.load(Ordering::Relaxed) == 0 {
        if waited >= next_check {
            if connect::has_launcher_ended() {
                return false;
            }
            next_check = waited + LAUNCHER_CHECK_INTERVAL;
        }
        let time = libc::timespec { tv_sec: 0, tv_nsec: sleep.subsec_nanos().into() };
        // SAFETY: `time` is a valid timespec, and a null pointer discards the remaining time. A signal may end the
        // sleep early without harm.
        unsafe { libc::nanosleep(&time, std::ptr::null_mut()) };
        sleep = (sleep * 2).min(MAX_SLEEP);
        if done() {
            return true;
        }
        // Measures the time instead of adding up the sleeps: on a busy machine a sleep takes much longer than
        // requested.
        let before = std::mem::replace(&mut now, monotonic());
        waited += now.saturating_sub(before).min(MAX_COUNTED_SLEEP);
        let taken_before = std::mem::replace(&mut taken, header.taken.0.load(Ordering::Relaxed));
        if taken != taken_before {
            (waited, next_check) = (Duration::ZERO, LAUNCHER_CHECK_INTERVAL);
        }
    }
    false
}

fn monotonic() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable, and every Linux kernel has `CLOCK_MONOTONIC`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Cuts a string to [`MAX_STRING`] bytes at a character boundary, and counts the cut.
pub(crate) fn truncate<'a>(process: &Process, text: &'a str) -> &'a str {
    if text.len() <= MAX_STRING {
        return text;
    }
    process.count(Counter::StringsTruncated, 1);
    let end = (0..=MAX_STRING).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
