//! Reading a trace file: one quick survey, then events block by block, in any number of passes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::block::{MAX_EVENTS, PREFIX, Prefix};
use super::decoder::{Decoder, LostBlock};
use super::definitions::{Bounds, Definitions};
use super::foreign;
use super::frame::{FILE_HEADER, FRAME_HEADER, FrameHeader, Kind, MAX_PAYLOAD, check_file_header};
use super::writer::End;
use crate::clock::{Calibration, ClockPoint};
use crate::counters::{COUNTER_SLOTS, Counter};
use crate::definition::Definition;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::version::Version;
use crate::wire::Cursor;

/// What could not be read, counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Damage {
    /// Stretches of bytes that were no sound frame.
    pub damaged_places: u64,
    /// Their total length, a cut tail included.
    pub bytes_skipped: u64,
    /// The file ends in the middle of a frame: the recorder was stopped while writing. Expected after a SIGKILL.
    pub cut_tail: bool,
    /// Frames of kinds this build does not know (a newer minor version wrote them).
    pub unknown_frames: u64,
    /// Definitions of kinds this build does not know.
    pub unknown_definitions: u64,
    /// Definitions that could not be decoded.
    pub malformed_definitions: u64,
}

impl Damage {
    /// Whether everything was read.
    pub fn is_none(&self) -> bool {
        *self == Damage::default()
    }
}

/// One block of events, as the survey saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// Offset of the frame in the file.
    pub offset: u64,
    /// Events it says it holds.
    pub events: u32,
    /// `seq` of the first.
    pub first_seq: u64,
    /// Earliest moment, in ticks.
    pub first_ticks: u64,
    /// Latest moment, in ticks.
    pub last_ticks: u64,
    pub(super) header: FrameHeader,
}

/// An opened trace. Reading is by position: any number of passes may run, also in parallel.
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
}

impl Reader {
    /// Opens and surveys a trace: definitions, clock, counters and the index of blocks. A damaged file opens with what
    /// can be saved and [`Self::damage`] says what could not.
    pub fn open(path: impl AsRef<Path>) -> Result<Reader> {
        let path = path.as_ref();
        let file = foreign::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        Reader::of(path, file)
    }

    /// The same of a file that is open; `path` is for messages.
    pub fn of(path: &Path, file: File) -> Result<Reader> {
        let len = foreign::check(&file).map_err(Error::io(format!("cannot read {}", path.display())))?.len();
        let mut start = vec![0; FILE_HEADER.min(len as usize)];
        file.read_exact_at(&mut start, 0).map_err(Error::io(format!("cannot read {}", path.display())))?;
        let version = check_file_header(&start)?;
        let mut reader = Reader {
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
        };
        reader.survey(len)?;
        reader.definitions.place_origins();
        Ok(reader)
    }

    /// Where the trace was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format version that wrote it.
    pub fn version(&self) -> Version {
        self.version
    }

    /// One JSON object about the process; empty when its frame is damaged.
    pub fn info(&self) -> &str {
        &self.info
    }

    /// What the ids in events mean.
    pub fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    /// The same, for whoever finds out more about them.
    pub fn definitions_mut(&mut self) -> &mut Definitions {
        &mut self.definitions
    }

    /// The clock points, in order.
    pub fn clock_points(&self) -> &[ClockPoint] {
        &self.clock_points
    }

    /// Ticks to time.
    pub fn calibration(&self) -> Calibration {
        Calibration::new(&self.clock_points)
    }

    /// A counter's last recorded value.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters.get(counter as usize).copied().unwrap_or(0)
    }

    /// How the recording ended; `None` when the recorder itself was cut off.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// What could not be read in the survey. Blocks that fail to decode are reported by [`Events`].
    pub fn damage(&self) -> &Damage {
        &self.damage
    }

    /// The index of blocks, in file order.
    pub fn blocks(&self) -> &[BlockInfo] {
        &self.blocks
    }

    /// Events the trace says it holds.
    pub fn event_count(&self) -> u64 {
        self.blocks.iter().map(|b| u64::from(b.events)).sum()
    }

    /// All events, block by block, in order of `seq` but for the late ones that [`End::late`] counts.
    pub fn events(&self) -> Events<'_> {
        Events { decoder: self.decoder(), blocks: self.blocks.iter() }
    }

    /// Reads blocks one after another; each thread needs one of its own.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self)
    }

    /// Decodes one block into `out`. For many blocks [`Self::decoder`] is cheaper.
    pub fn decode(&self, info: &BlockInfo, out: &mut Vec<Event>) -> Result<(), LostBlock> {
        self.decoder().decode(info, out)
    }

    /// Reads a frame's payload into `payload` and checks it.
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

    fn survey(&mut self, len: u64) -> Result<()> {
        let mut bounds = Bounds::default();
        let mut at = FILE_HEADER as u64;
        while at < len {
            let Some(header) = self.header_at(at, len)? else {
                // Damage, or the cut tail: look for the next frame.
                let next = self.resync(at + 1, len)?;
                self.damage.damaged_places += 1;
                self.damage.bytes_skipped += next - at;
                self.damage.cut_tail |= next == len;
                at = next;
                continue;
            };
            let end = at + FRAME_HEADER as u64 + u64::from(header.stored_len);
            if end > len {
                self.damage.cut_tail = true;
                self.damage.bytes_skipped += len - at;
                return Ok(());
            }
            if !self.take_frame(at, &header, &mut bounds) {
                self.damage.damaged_places += 1;
                self.damage.bytes_skipped += end - at;
            }
            at = end;
        }
        Ok(())
    }

    /// The frame header at this offset, if there is a sound one.
    fn header_at(&self, at: u64, len: u64) -> Result<Option<FrameHeader>> {
        if len - at < FRAME_HEADER as u64 {
            return Ok(None);
        }
        let mut bytes = [0; FRAME_HEADER];
        self.file.read_exact_at(&mut bytes, at).map_err(Error::io(format!("cannot read {}", self.path.display())))?;
        Ok(FrameHeader::from_bytes(&bytes))
    }

    /// The offset of the next sound frame header at or after `from`, or `len`.
    fn resync(&self, from: u64, len: u64) -> Result<u64> {
        let mut window = vec![0; 64 * 1024];
        let mut at = from;
        while len - at >= FRAME_HEADER as u64 {
            let take = window.len().min((len - at) as usize);
            self.file
                .read_exact_at(&mut window[..take], at)
                .map_err(Error::io(format!("cannot read {}", self.path.display())))?;
            let mut headers = window[..take].windows(FRAME_HEADER).filter_map(|bytes| bytes.first_chunk());
            if let Some(offset) = headers.position(|bytes| FrameHeader::from_bytes(bytes).is_some()) {
                return Ok(at + offset as u64);
            }
            // Headers that begin in the last bytes lie whole in the next window.
            at += (take - FRAME_HEADER + 1) as u64;
        }
        Ok(len)
    }

    /// Takes what a frame holds; false when the frame cannot be used.
    fn take_frame(&mut self, offset: u64, header: &FrameHeader, bounds: &mut Bounds) -> bool {
        if let Kind::Events = header.kind {
            return self.take_block(offset, header);
        }
        if let Kind::Unknown(_) = header.kind {
            self.damage.unknown_frames += 1;
            return true;
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
                Ok(info) => self.info = info,
                Err(_) => return false,
            },
            Kind::Definitions => return self.take_definitions(&raw, bounds),
            Kind::Clock => {
                let Some(point) = clock_point(&raw) else { return false };
                self.clock_points.push(point);
            }
            Kind::Counters => {
                let mut c = Cursor::new(&raw);
                for place in &mut self.counters {
                    let Ok(value) = c.varint() else { break };
                    *place = value;
                }
            }
            Kind::End => match End::decode(&raw) {
                Ok(end) => self.end = Some(end),
                Err(_) => return false,
            },
            Kind::Events | Kind::Unknown(_) => {}
        }
        true
    }

    fn take_block(&mut self, offset: u64, header: &FrameHeader) -> bool {
        let mut prefix = [0; PREFIX];
        if header.stored_len < PREFIX as u32
            || self.file.read_exact_at(&mut prefix, offset + FRAME_HEADER as u64).is_err()
        {
            return false;
        }
        let Some(prefix) = Prefix::from_bytes(&prefix) else { return false };
        // An event takes at least a byte in each of seven columns.
        if prefix.count > header.raw_len / 7 || prefix.count > MAX_EVENTS {
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

    fn take_definitions(&mut self, raw: &[u8], bounds: &mut Bounds) -> bool {
        let mut cursor = Cursor::new(raw);
        while !cursor.is_empty() {
            let before = cursor.rest().len();
            match Definition::decode(&mut cursor) {
                Ok(Some(definition)) => {
                    if !self.definitions.add(&definition, before - cursor.rest().len(), bounds) {
                        self.damage.malformed_definitions += 1;
                    }
                }
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

/// Events, block by block. A block that cannot be decoded is an `Err` that says what is lost; the next one follows.
#[derive(Debug)]
pub struct Events<'a> {
    decoder: Decoder<'a>,
    blocks: std::slice::Iter<'a, BlockInfo>,
}

impl Iterator for Events<'_> {
    type Item = Result<Vec<Event>, LostBlock>;

    fn next(&mut self) -> Option<Self::Item> {
        let info = self.blocks.next()?;
        let mut events = Vec::new();
        Some(self.decoder.decode(info, &mut events).map(|()| events))
    }
}
