//! Reads a trace file: first an index, then events block by block, in any number of passes.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::block::{MAX_EVENTS, PREFIX, Prefix};
use super::budget::{Budget, Exceeded, json_memory};
use super::definitions::{Bounds, Definitions, Refusal};
use super::frame::{FILE_HEADER, FRAME_HEADER, FrameHeader, Kind, MAX_PAYLOAD, check_file_header};
use super::untrusted;
use super::writer::End;
use crate::clock::{Calibration, ClockPoint};
use crate::counters::{COUNTER_SLOTS, Counter, CounterValues};
use crate::definition::Definition;
use crate::error::{Error, Result};
use crate::version::Version;
use crate::wire::Cursor;

/// The longest reason of an end, in bytes. The launcher writes a few words.
const MAX_REASON: usize = 4096;

/// Counts of what could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Damage {
    /// How many byte ranges contain no valid frame.
    pub damaged_ranges: u64,
    /// Their total length in bytes, including a cut end of the file.
    pub bytes_skipped: u64,
    /// Whether the file ends inside a frame, because the launcher was stopped while writing. Expected after a SIGKILL.
    pub is_tail_truncated: bool,
    /// How many frames have an unknown kind (of a newer minor version).
    pub unknown_frames: u64,
    /// How many definitions have an unknown kind.
    pub unknown_definitions: u64,
    /// How many definitions could not be decoded.
    pub malformed_definitions: u64,
    /// How many definitions and frames were left out or cut, because they need more memory or work than a file of this
    /// size may take ([`super::budget`]). [`Reader::exceeded`] has the limit.
    pub over_budget: u64,
}

impl Damage {
    /// Whether everything was read.
    pub fn is_none(&self) -> bool {
        *self == Damage::default()
    }
}

/// One block of events in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// The offset of the frame in the file, in bytes.
    pub offset: u64,
    /// The number of events that the block states.
    pub events: u32,
    /// The `seq` of the first event.
    pub first_seq: u64,
    /// The earliest timestamp, in the unit of [`crate::clock`].
    pub first_ticks: u64,
    /// The latest timestamp, in the unit of [`crate::clock`].
    pub last_ticks: u64,
    pub(super) header: FrameHeader,
}

impl BlockInfo {
    /// The offset after the frame in the file, in bytes.
    pub fn end(&self) -> u64 {
        self.offset + FRAME_HEADER as u64 + u64::from(self.header.stored_len)
    }
}

/// An open trace. Reads are positional, so any number of passes may run, even in parallel.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: File,
    version: Version,
    info: String,
    definitions: Definitions,
    clock_points: Vec<ClockPoint>,
    counters: Vec<u64>,
    end: Option<End>,
    blocks: Vec<BlockInfo>,
    damage: Damage,
    exceeded: Option<Exceeded>,
    /// Where [`Self::follow`] goes on, as an offset in the file.
    followed_to: u64,
}

impl Reader {
    /// Opens a trace and reads its definitions, clock points, counters and the index of blocks. A damaged file opens
    /// with its valid parts, and [`Self::damage`] counts the rest.
    pub fn open(path: impl AsRef<Path>) -> Result<Reader> {
        let path = path.as_ref();
        let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        Reader::of(path, file)
    }

    /// [`Self::open`] for a file that is open already. `path` is for messages.
    pub fn of(path: &Path, file: File) -> Result<Reader> {
        Reader::within(path, file, &Budget::default())
    }

    /// [`Self::of`] for one of several files that share a budget. The file's own size is added to it.
    pub fn within(path: &Path, file: File, budget: &Budget) -> Result<Reader> {
        let len = untrusted::check(&file).map_err(Error::io(format!("cannot read {}", path.display())))?.len();
        budget.add_file(&file).map_err(Error::io(format!("cannot read {}", path.display())))?;
        let mut reader = Reader::unread(path, file, len)?;
        reader.read_index(len, budget)?;
        reader.damage.over_budget += reader.definitions.complete(budget);
        Ok(reader)
    }

    /// Opens a trace that is still being written, to read its events while it grows: [`Self::follow`] reads the index.
    /// Definitions are left out.
    pub fn following(path: impl AsRef<Path>) -> Result<Reader> {
        let path = path.as_ref();
        let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        let len = untrusted::check(&file).map_err(Error::io(format!("cannot read {}", path.display())))?.len();
        Reader::unread(path, file, len)
    }

    /// A reader of a file whose header is valid, and of which nothing else was read. `len` is the length of the file.
    fn unread(path: &Path, file: File, len: u64) -> Result<Reader> {
        let mut start = vec![0; FILE_HEADER.min(len as usize)];
        file.read_exact_at(&mut start, 0).map_err(Error::io(format!("cannot read {}", path.display())))?;
        let version = check_file_header(&start)?;
        Ok(Reader {
            path: path.to_owned(),
            file,
            version,
            info: String::new(),
            definitions: Definitions::default(),
            clock_points: Vec::new(),
            counters: vec![0; COUNTER_SLOTS],
            end: None,
            blocks: Vec::new(),
            damage: Damage::default(),
            exceeded: None,
            followed_to: FILE_HEADER as u64,
        })
    }

    /// Adds the blocks, the clock points and the end that were appended since the last call to the index. Returns the
    /// number of new blocks. A frame that is not complete yet is left for the next call.
    pub fn follow(&mut self) -> Result<usize> {
        let cannot = || Error::io(format!("cannot read {}", self.path.display()));
        let len = untrusted::check(&self.file).map_err(cannot())?.len();
        let budget = Budget::of_file(&self.file).map_err(cannot())?;
        let (mut bounds, before) = (Bounds::new(&budget), self.blocks.len());
        while self.followed_to < len {
            let at = self.followed_to;
            let Some(header) = self.header_at(at, len)? else {
                let next = self.resync(at + 1, len)?;
                if next < len {
                    self.damage.damaged_ranges += 1;
                    self.damage.bytes_skipped += next - at;
                    self.followed_to = next;
                    continue;
                }
                break;
            };
            let end = at + FRAME_HEADER as u64 + u64::from(header.stored_len);
            if end > len {
                break;
            }
            if matches!(header.kind, Kind::Events | Kind::Clock | Kind::End)
                && !self.read_frame(at, &header, &budget, &mut bounds)
            {
                self.damage.damaged_ranges += 1;
                self.damage.bytes_skipped += end - at;
            }
            self.followed_to = end;
        }
        Ok(self.blocks.len() - before)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether another file has taken the place of this one: rotation has replaced the trace that is being written.
    pub fn is_replaced(&self) -> bool {
        let id = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        match (self.file.metadata(), std::fs::metadata(&self.path)) {
            (Ok(open), Ok(named)) => id(open) != id(named),
            _ => false,
        }
    }

    /// All counters, by index.
    pub fn counters(&self) -> CounterValues {
        let mut values = [0; COUNTER_SLOTS];
        values.iter_mut().zip(&self.counters).for_each(|(value, counter)| *value = *counter);
        values
    }

    /// The path of the trace.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format version of the file.
    pub fn version(&self) -> Version {
        self.version
    }

    /// One JSON object about the process. Empty if its frame is damaged.
    pub fn info(&self) -> &str {
        &self.info
    }

    /// The meaning of the ids in events.
    pub fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    /// The definitions, for adding to them.
    pub fn definitions_mut(&mut self) -> &mut Definitions {
        &mut self.definitions
    }

    /// The clock points, in order.
    pub fn clock_points(&self) -> &[ClockPoint] {
        &self.clock_points
    }

    /// The conversion from counter values to time.
    pub fn calibration(&self) -> Calibration {
        Calibration::new(&self.clock_points)
    }

    /// The last recorded value of a counter, 0 if it was not recorded.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters.get(counter as usize).copied().unwrap_or(0)
    }

    /// How the recording ended. `None` if the launcher was killed.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// The parts that the index could not include.
    pub fn damage(&self) -> &Damage {
        &self.damage
    }

    /// The first limit that made the index leave something out; `None` if none did. [`Damage::over_budget`] has the
    /// count.
    pub fn exceeded(&self) -> Option<Exceeded> {
        self.exceeded
    }

    /// The index of blocks, in file order.
    pub fn blocks(&self) -> &[BlockInfo] {
        &self.blocks
    }

    /// The number of events that the blocks state.
    pub fn event_count(&self) -> u64 {
        self.blocks.iter().map(|b| u64::from(b.events)).sum()
    }

    /// Reads a frame's payload into `payload` and verifies its checksum.
    pub(super) fn read_payload(&self, offset: u64, header: &FrameHeader, payload: &mut Vec<u8>) -> Result<()> {
        payload.resize(header.stored_len as usize, 0);
        self.file
            .read_exact_at(payload, offset + FRAME_HEADER as u64)
            .map_err(Error::io(format!("cannot read {}", self.path.display())))?;
        if crc32fast::hash(payload) != header.crc {
            return Err(Error::Malformed { what: "frame: its checksum does not match" });
        }
        Ok(())
    }

    fn read_index(&mut self, len: u64, budget: &Budget) -> Result<()> {
        let mut bounds = Bounds::new(budget);
        let mut at = FILE_HEADER as u64;
        while at < len {
            let Some(header) = self.header_at(at, len)? else {
                // Damage, or a cut end of the file: search for the next frame.
                let next = self.resync(at + 1, len)?;
                self.damage.damaged_ranges += 1;
                self.damage.bytes_skipped += next - at;
                self.damage.is_tail_truncated |= next == len;
                at = next;
                continue;
            };
            let end = at + FRAME_HEADER as u64 + u64::from(header.stored_len);
            if end > len {
                self.damage.is_tail_truncated = true;
                self.damage.bytes_skipped += len - at;
                return Ok(());
            }
            let read = self.read_frame(at, &header, budget, &mut bounds);
            if !read {
                self.damage.damaged_ranges += 1;
                self.damage.bytes_skipped += end - at;
            }
            at = end;
        }
        Ok(())
    }

    fn leave_out(&mut self, exceeded: Exceeded) {
        self.exceeded.get_or_insert(exceeded);
        self.damage.over_budget += 1;
    }

    /// The frame header at this offset. `None` if there is no valid one.
    fn header_at(&self, at: u64, len: u64) -> Result<Option<FrameHeader>> {
        if len - at < FRAME_HEADER as u64 {
            return Ok(None);
        }
        let mut bytes = [0; FRAME_HEADER];
        self.file.read_exact_at(&mut bytes, at).map_err(Error::io(format!("cannot read {}", self.path.display())))?;
        Ok(FrameHeader::from_bytes(&bytes))
    }

    /// The offset of the next valid frame header from `from` on, or `len`. Holes contain none and are not read.
    fn resync(&self, from: u64, len: u64) -> Result<u64> {
        let mut window = vec![0; 64 * 1024];
        let mut at = from;
        while len - at >= FRAME_HEADER as u64 {
            let Some((data, _)) = untrusted::next_data(&self.file, at, len) else { break };
            // A header does not begin in the hole before, because its first byte is not zero.
            at = data;
            let take = window.len().min((len - at) as usize);
            self.file
                .read_exact_at(&mut window[..take], at)
                .map_err(Error::io(format!("cannot read {}", self.path.display())))?;
            let mut headers = window[..take].windows(FRAME_HEADER).filter_map(|bytes| bytes.first_chunk());
            if let Some(offset) = headers.position(|bytes| FrameHeader::from_bytes(bytes).is_some()) {
                return Ok(at + offset as u64);
            }
            // A header that starts in the last bytes is complete in the next window.
            at += (take.max(FRAME_HEADER) - FRAME_HEADER + 1) as u64;
        }
        Ok(len)
    }

    /// Reads the content of a frame. Returns `false` if it is invalid.
    fn read_frame(&mut self, offset: u64, header: &FrameHeader, budget: &Budget, bounds: &mut Bounds<'_>) -> bool {
        if let Kind::Events = header.kind {
            return self.read_block(offset, header, budget);
        }
        if let Kind::Unknown(_) = header.kind {
            self.damage.unknown_frames += 1;
            return true;
        }
        // A hole stores no bytes, and one stored byte decompresses to thousands.
        if let Err(exceeded) = budget.work(1 + u64::from(header.stored_len) / 16 + u64::from(header.raw_len) / 2) {
            self.leave_out(exceeded);
            return false;
        }
        let mut payload = Vec::new();
        if self.read_payload(offset, header, &mut payload).is_err() {
            return false;
        }
        let raw = if header.compressed {
            match decompress(&payload, header) {
                Ok(raw) => raw,
                Err(_) => return false,
            }
        } else {
            payload
        };
        match header.kind {
            Kind::Info => match String::from_utf8(raw) {
                Ok(info) => {
                    // The text, and what it becomes when it is parsed.
                    if let Err(exceeded) = budget.hold(json_memory(info.as_bytes())) {
                        self.leave_out(exceeded);
                        return false;
                    }
                    self.info = info;
                }
                Err(_) => return false,
            },
            Kind::Definitions => return self.read_definitions(&raw, bounds),
            Kind::Clock => {
                let Some(point) = clock_point(&raw) else { return false };
                self.clock_points.push(point);
            }
            Kind::Counters => {
                let mut c = Cursor::new(&raw);
                for slot in &mut self.counters {
                    let Ok(value) = c.varint() else { break };
                    *slot = value;
                }
            }
            Kind::End => match End::decode(&raw) {
                Ok(end) if end.reason.len() <= MAX_REASON => self.end = Some(end),
                _ => return false,
            },
            Kind::Events | Kind::Unknown(_) => {}
        }
        true
    }

    fn read_block(&mut self, offset: u64, header: &FrameHeader, budget: &Budget) -> bool {
        let mut prefix = [0; PREFIX];
        if header.stored_len < PREFIX as u32
            || self.file.read_exact_at(&mut prefix, offset + FRAME_HEADER as u64).is_err()
        {
            return false;
        }
        let Some(prefix) = Prefix::from_bytes(&prefix) else { return false };
        // Every event takes at least one byte in each of seven columns.
        if prefix.count > header.raw_len / 7 || prefix.count > MAX_EVENTS {
            return false;
        }
        // Each pass decodes the block.
        let steps = u64::from(prefix.count) + u64::from(header.stored_len) / 16 + u64::from(header.raw_len) / 8;
        if let Err(exceeded) = budget.work(steps) {
            self.leave_out(exceeded);
            return false;
        }
        self.blocks.push(BlockInfo {
            offset,
            events: prefix.count,
            first_seq: prefix.first_seq,
            first_ticks: prefix.first_ticks,
            last_ticks: prefix.last_ticks,
            header: *header,
        });
        true
    }

    fn read_definitions(&mut self, raw: &[u8], bounds: &mut Bounds<'_>) -> bool {
        let mut cursor = Cursor::new(raw);
        while !cursor.is_empty() {
            match Definition::decode(&mut cursor) {
                Ok(Some(definition)) => match self.definitions.add(&definition, bounds) {
                    Ok(()) => {}
                    Err(Refusal::Invalid) => self.damage.malformed_definitions += 1,
                    Err(Refusal::Exceeded(exceeded)) => self.leave_out(exceeded),
                },
                Ok(None) => self.damage.unknown_definitions += 1,
                Err(_) => {
                    self.damage.malformed_definitions += 1;
                    return false;
                }
            }
        }
        true
    }
}

fn clock_point(raw: &[u8]) -> Option<ClockPoint> {
    let word = |at: usize| Some(u64::from_le_bytes(raw.get(at..at + 8)?.try_into().ok()?));
    Some(ClockPoint { ticks: word(0)?, monotonic_ns: word(8)?, realtime_ns: word(16)? })
}

fn decompress(stored: &[u8], header: &FrameHeader) -> Result<Vec<u8>> {
    if header.raw_len > MAX_PAYLOAD {
        return Err(Error::Malformed { what: "frame: its length" });
    }
    zstd::bulk::decompress(stored, header.raw_len as usize).map_err(|_| Error::Malformed { what: "compressed frame" })
}
