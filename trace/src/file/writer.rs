//! Writes a trace file. The launcher does so while the process runs.

use std::io::Write;

use super::block::{self, BLOCK_EVENTS, PREFIX, Prefix};
use super::frame::{FrameHeader, Kind, MAX_PAYLOAD, file_header};
use crate::clock::ClockPoint;
use crate::counters::CounterValues;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::wire::{Cursor, put_str, put_varint, unzigzag, zigzag};

/// Level 1 handles a million events a second beside a busy program. Higher levels gain little on columns.
const LEVEL: i32 = 1;
/// Definitions are written once this many bytes have accumulated.
const DEFINITION_BYTES: usize = 64 * 1024;

/// How a recording ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct End {
    /// The status of `wait(2)`, if the launcher is the parent.
    pub wait_status: Option<i32>,
    /// How many events were numbered and never arrived.
    pub lost: u64,
    /// How many events arrived after the writer had stopped waiting for them. They are out of order.
    pub late: u64,
    /// Why the recording ended: `exited`, `replaced by exec`, `still running`.
    pub reason: String,
}

impl End {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, self.wait_status.map_or(0, |s| zigzag(s.into()) + 1));
        put_varint(&mut out, self.lost);
        put_varint(&mut out, self.late);
        put_str(&mut out, &self.reason);
        out
    }

    /// Decodes the payload of an end frame. The error is [`Error::Malformed`].
    pub(super) fn decode(bytes: &[u8]) -> Result<End> {
        let mut c = Cursor::new(bytes);
        let status = c.varint()?;
        Ok(End {
            wait_status: (status != 0).then(|| unzigzag(status - 1) as i32),
            lost: c.varint()?,
            late: c.varint()?,
            reason: c.str()?.to_owned(),
        })
    }
}

/// Writes a trace to `out`, frame by frame. Every frame reaches `out` completely, in one call.
///
/// Errors are those of `out`. After one, nothing more is written, so the file is a valid trace up to the frame that
/// failed.
pub struct Writer<W: Write> {
    out: W,
    events: Vec<Event>,
    definitions: Vec<u8>,
    raw: Vec<u8>,
    stored: Vec<u8>,
    zstd: zstd::bulk::Compressor<'static>,
    failed: bool,
}

impl<W: Write> std::fmt::Debug for Writer<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("open_events", &self.events.len()).finish_non_exhaustive()
    }
}

impl<W: Write> Writer<W> {
    /// Starts a trace. `info` is one JSON object about the process.
    pub fn new(mut out: W, info: &str) -> Result<Writer<W>> {
        out.write_all(&file_header()).map_err(Error::io("cannot write the trace"))?;
        let zstd = zstd::bulk::Compressor::new(LEVEL).map_err(Error::io("cannot start zstd"))?;
        let mut writer = Writer {
            out,
            events: Vec::with_capacity(BLOCK_EVENTS),
            definitions: Vec::new(),
            raw: Vec::new(),
            stored: Vec::new(),
            zstd,
            failed: false,
        };
        writer.frame(Kind::Info, info.as_bytes())?;
        Ok(writer)
    }

    /// Adds a definition, encoded by [`crate::definition::Definition::encode`]. The caller has verified that it can be
    /// decoded.
    pub fn definition(&mut self, encoded: &[u8]) -> Result<()> {
        self.definitions.extend_from_slice(encoded);
        if self.definitions.len() >= DEFINITION_BYTES { self.flush_definitions() } else { Ok(()) }
    }

    /// Adds an event. Events must be in order of `seq`.
    pub fn event(&mut self, event: &Event) -> Result<()> {
        self.events.push(*event);
        if self.events.len() >= BLOCK_EVENTS { self.flush() } else { Ok(()) }
    }

    /// Adds a clock point.
    pub fn clock(&mut self, point: ClockPoint) -> Result<()> {
        let mut payload = [0; 24];
        payload[..8].copy_from_slice(&point.ticks.to_le_bytes());
        payload[8..16].copy_from_slice(&point.monotonic_ns.to_le_bytes());
        payload[16..].copy_from_slice(&point.realtime_ns.to_le_bytes());
        self.frame(Kind::Clock, &payload)
    }

    /// Writes the current counters. The last record in the file is valid.
    pub fn counters(&mut self, values: &CounterValues) -> Result<()> {
        self.frame(Kind::Counters, &encode_counters(values))
    }

    /// Writes the open block and all definitions to `out`.
    pub fn flush(&mut self) -> Result<()> {
        self.flush_definitions()?;
        if self.events.is_empty() {
            return Ok(());
        }
        let prefix = Prefix::of(&self.events);
        block::encode(&prefix, &self.events, &mut self.raw);
        self.events.clear();
        self.compress()?;
        let mut payload = Vec::with_capacity(PREFIX + self.stored.len());
        payload.extend_from_slice(&prefix.to_bytes());
        payload.extend_from_slice(&self.stored);
        self.write_frame(Kind::Events, true, self.raw.len() as u32, &payload)
    }

    /// Goes on in `out`, a trace with frames of its own, and returns the former one, which has everything so far.
    pub fn continue_in(&mut self, out: W) -> Result<W> {
        self.flush()?;
        Ok(std::mem::replace(&mut self.out, out))
    }

    /// Writes everything so far, and returns `out` without an end of the trace.
    pub fn into_out(mut self) -> Result<W> {
        self.flush()?;
        Ok(self.out)
    }

    /// Where the trace is written to.
    pub fn out(&self) -> &W {
        &self.out
    }

    /// Ends the trace and returns `out`.
    pub fn finish(mut self, end: &End) -> Result<W> {
        self.flush()?;
        self.frame(Kind::End, &end.encode())?;
        self.out.flush().map_err(Error::io("cannot write the trace"))?;
        Ok(self.out)
    }

    fn flush_definitions(&mut self) -> Result<()> {
        if self.definitions.is_empty() {
            return Ok(());
        }
        std::mem::swap(&mut self.raw, &mut self.definitions);
        self.definitions.clear();
        self.compress()?;
        let payload = std::mem::take(&mut self.stored);
        let written = self.write_frame(Kind::Definitions, true, self.raw.len() as u32, &payload);
        self.stored = payload;
        written
    }

    /// Compresses `raw` into `stored`.
    fn compress(&mut self) -> Result<()> {
        self.stored.clear();
        self.stored.reserve(zstd::zstd_safe::compress_bound(self.raw.len()));
        self.zstd
            .compress_to_buffer(&self.raw, &mut self.stored)
            .map(|_| ())
            .map_err(Error::io("cannot compress a block of the trace"))
    }

    fn frame(&mut self, kind: Kind, payload: &[u8]) -> Result<()> {
        self.write_frame(kind, false, payload.len() as u32, payload)
    }

    fn write_frame(&mut self, kind: Kind, compressed: bool, raw_len: u32, payload: &[u8]) -> Result<()> {
        if self.failed {
            return Err(Error::io("cannot write the trace")(std::io::Error::other("an earlier write failed")));
        }
        debug_assert!(payload.len() <= MAX_PAYLOAD as usize && raw_len <= MAX_PAYLOAD);
        self.out.write_all(&envelope(kind, compressed, raw_len, payload)).map_err(|e| {
            self.failed = true;
            Error::io("cannot write the trace")(e)
        })
    }
}

/// The bytes of a frame.
fn envelope(kind: Kind, compressed: bool, raw_len: u32, payload: &[u8]) -> Vec<u8> {
    let header =
        FrameHeader { kind, compressed, stored_len: payload.len() as u32, raw_len, crc: crc32fast::hash(payload) };
    let mut frame = Vec::with_capacity(size_of::<FrameHeader>() + payload.len());
    frame.extend_from_slice(&header.to_bytes());
    frame.extend_from_slice(payload);
    frame
}

fn encode_counters(values: &CounterValues) -> Vec<u8> {
    let mut payload = Vec::with_capacity(values.len());
    for value in values {
        put_varint(&mut payload, *value);
    }
    payload
}

/// Ends a trace whose [`Writer`] has failed. `out` is positioned after the last complete frame, and `end` states what
/// is missing after it.
pub fn end_after_failure(out: &mut impl Write, counters: Option<&CounterValues>, end: &End) -> Result<()> {
    let mut frame = |kind, payload: &[u8]| {
        let frame = envelope(kind, false, payload.len() as u32, payload);
        out.write_all(&frame).map_err(Error::io("cannot write the trace"))
    };
    if let Some(values) = counters {
        frame(Kind::Counters, &encode_counters(values))?;
    }
    frame(Kind::End, &end.encode())
}
