//! Streams and events on a virtual timeline.
//!
//! Work is done at once, and only its *end* is simulated. Each launch extends the time for which its stream is busy by
//! `SIMCUDA_KERNEL_US` microseconds. Until then, queries return "not ready". The clock advances by a fixed time with
//! each call about a stream, and to the end of the work with each synchronization, so the results do not depend on how
//! fast the machine is.

use crate::error::{Error, Result};
use crate::handle::{Handles, Kind, fixed};
use std::collections::HashMap;

/// The handle of the per-thread default stream (`CU_STREAM_PER_THREAD`).
pub const PER_THREAD: u64 = 2;

/// One stream.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The device ordinal.
    pub device: usize,
    /// The creation flags.
    pub flags: u32,
    /// The priority. 0 is the lowest.
    pub priority: i32,
    /// The number that `cuStreamGetId` returns.
    pub id: u64,
    /// When all work issued so far is done, in nanoseconds of the virtual clock.
    pub busy_until: u64,
    /// The capture in which it takes part. That capture may have ended since.
    pub capture: Option<u64>,
}

/// One event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Event {
    /// When the work before it is done, in nanoseconds. `None` until it is recorded.
    pub ready_at: Option<u64>,
    /// The capture in which it was recorded.
    pub capture: Option<u64>,
}

/// All streams and events of the process.
#[derive(Debug)]
pub struct Streams {
    streams: HashMap<u64, Stream>,
    events: HashMap<u64, Event>,
}

/// The handle under which a device's default stream is stored.
fn default_stream(device: usize) -> u64 {
    fixed(Kind::Stream, (1 << 32) + device as u64)
}

impl Streams {
    /// Creates the default streams of `devices` devices.
    pub fn new(devices: usize, handles: &mut Handles) -> Self {
        let streams = (0..devices)
            .map(|device| {
                let id = handles.unique();
                let stream = Stream { device, flags: 0, priority: 0, id, busy_until: 0, capture: None };
                (default_stream(device), stream)
            })
            .collect();
        Streams { streams, events: HashMap::new() }
    }

    /// The key of a stream handle. The default handles (null, legacy, per-thread) all stand for the current device's
    /// default stream.
    fn key(handle: u64, current: usize) -> u64 {
        if handle <= PER_THREAD { default_stream(current) } else { handle }
    }

    /// The stream of a handle. Fails with `InvalidHandle` when there is none.
    pub fn get(&self, handle: u64, current: usize) -> Result<&Stream> {
        self.streams.get(&Self::key(handle, current)).ok_or(Error::InvalidHandle)
    }

    /// The stream of a handle, for changes.
    pub fn get_mut(&mut self, handle: u64, current: usize) -> Result<&mut Stream> {
        self.streams.get_mut(&Self::key(handle, current)).ok_or(Error::InvalidHandle)
    }

    /// Creates a stream and returns its handle.
    pub fn create(&mut self, device: usize, flags: u32, priority: i32, handles: &mut Handles) -> u64 {
        let handle = handles.deal(Kind::Stream);
        let id = handles.unique();
        self.streams.insert(handle, Stream { device, flags, priority, id, busy_until: 0, capture: None });
        handle
    }

    /// Destroys a stream. Default streams cannot be destroyed.
    pub fn destroy(&mut self, handle: u64) -> Result<()> {
        if handle <= PER_THREAD {
            return Err(Error::InvalidHandle);
        }
        self.streams.remove(&handle).map(drop).ok_or(Error::InvalidHandle)
    }

    /// Creates an event and returns its handle.
    pub fn create_event(&mut self, handles: &mut Handles) -> u64 {
        let handle = handles.deal(Kind::Event);
        self.events.insert(handle, Event::default());
        handle
    }

    /// The event with this handle.
    pub fn event(&self, handle: u64) -> Result<Event> {
        self.events.get(&handle).copied().ok_or(Error::InvalidHandle)
    }

    /// Destroys an event.
    pub fn destroy_event(&mut self, handle: u64) -> Result<()> {
        self.events.remove(&handle).map(drop).ok_or(Error::InvalidHandle)
    }

    /// Records an event after the work that a stream has now. `now` is in nanoseconds.
    pub fn record(&mut self, event: u64, stream: u64, current: usize, now: u64) -> Result<()> {
        let stream = self.get(stream, current)?;
        let (ready_at, capture) = (stream.busy_until.max(now), stream.capture);
        let event = self.events.get_mut(&event).ok_or(Error::InvalidHandle)?;
        *event = Event { ready_at: Some(ready_at), capture };
        Ok(())
    }

    /// Makes a stream wait for an event.
    ///
    /// `live` reports whether a capture is still running. A stream that waits for an event of a running capture joins
    /// it.
    pub fn wait(&mut self, stream: u64, event: u64, current: usize, live: impl Fn(u64) -> bool) -> Result<()> {
        let event = self.event(event)?;
        let stream = self.get_mut(stream, current)?;
        match event.capture.filter(|&id| live(id)) {
            Some(id) => stream.capture = Some(id),
            None => stream.busy_until = stream.busy_until.max(event.ready_at.unwrap_or(0)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_handles_mean_the_current_device() {
        let mut handles = Handles::default();
        let mut streams = Streams::new(2, &mut handles);
        streams.get_mut(0, 1).unwrap().busy_until = 50;
        assert_eq!(streams.get(1, 1).unwrap().busy_until, 50);
        assert_eq!(streams.get(PER_THREAD, 0).unwrap().busy_until, 0);
        assert!(streams.destroy(0).is_err());
    }

    #[test]
    fn a_waiting_stream_is_busy_until_the_event() {
        let mut handles = Handles::default();
        let mut streams = Streams::new(1, &mut handles);
        let (a, b) = (streams.create(0, 0, 0, &mut handles), streams.create(0, 0, 0, &mut handles));
        let event = streams.create_event(&mut handles);
        streams.get_mut(a, 0).unwrap().busy_until = 100;
        streams.record(event, a, 0, 10).unwrap();
        streams.wait(b, event, 0, |_| false).unwrap();
        assert_eq!(streams.get(b, 0).unwrap().busy_until, 100);
        streams.destroy(a).unwrap();
        assert_eq!(streams.destroy(a), Err(Error::InvalidHandle));
    }

    #[test]
    fn a_wait_for_a_captured_event_extends_the_capture() {
        let mut handles = Handles::default();
        let mut streams = Streams::new(1, &mut handles);
        let side = streams.create(0, 0, 0, &mut handles);
        let event = streams.create_event(&mut handles);
        streams.get_mut(0, 0).unwrap().capture = Some(5);
        streams.record(event, 0, 0, 0).unwrap();
        streams.wait(side, event, 0, |id| id == 5).unwrap();
        assert_eq!(streams.get(side, 0).unwrap().capture, Some(5));
    }
}
