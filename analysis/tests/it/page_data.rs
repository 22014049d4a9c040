//! Decodes the data of an HTML report, as the page's script does. `web/src/data/decode.ts` is the other reader.

use std::collections::BTreeMap;
use std::io::Read;

use serde_json::Value;

/// A block that the page lists.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Listed {
    pub(crate) alloc: u64,
    /// `None` if it was allocated at the end.
    pub(crate) free: Option<u64>,
    pub(crate) size: u64,
    pub(crate) address: u64,
    pub(crate) category: u64,
    /// The number of the module's text plus one; 0 without a module.
    pub(crate) module: u64,
    /// The number of the custom category plus one; 0 if no rule matches.
    pub(crate) custom: u64,
}

/// A named range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    /// `seq` of the start and of the end.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Microseconds since the first event.
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) track: u64,
    pub(crate) name: String,
    pub(crate) kind: u64,
    /// By device: allocated bytes at the start, at the highest point, and at the end.
    pub(crate) levels: Vec<[u64; 3]>,
}

/// The sum over ranks.
pub(crate) struct Totals {
    /// The series of each change, if the page has all.
    pub(crate) order: Vec<u64>,
    /// Otherwise, by point: the number of changes before it, its time in microseconds, and the bytes by series.
    pub(crate) points: Vec<(u64, u64, Vec<u64>)>,
    pub(crate) json: Value,
}

/// One device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceData {
    /// `seq` of each allocation and free.
    pub(crate) events: Vec<u64>,
    pub(crate) blocks: Vec<Listed>,
    /// By point: `seq`, allocated bytes, the number of blocks that are not listed, and their bytes by category.
    pub(crate) points: Vec<(u64, u64, i64, Vec<i64>)>,
    /// Reserved bytes after each change.
    pub(crate) reserved: Vec<(u64, u64)>,
    pub(crate) segments: usize,
}

/// The data of one process.
pub(crate) struct PageData {
    pub(crate) devices: BTreeMap<i64, DeviceData>,
    /// (`seq`, phase, step plus one)
    pub(crate) phases: Vec<(u64, u64, u64)>,
    pub(crate) ranges: Vec<Range>,
    pub(crate) json: Value,
}

/// The data elements of a page by id, decompressed.
pub(crate) fn elements(page: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for piece in page.split("<script type=\"application/octet-stream\" id=\"").skip(1) {
        let (id, rest) = piece.split_once("\">").unwrap();
        let (text, _) = rest.split_once("</script>").unwrap();
        let mut bytes = Vec::new();
        flate2::read::ZlibDecoder::new(&base64(text)[..]).read_to_end(&mut bytes).unwrap();
        found.insert(id.to_owned(), bytes);
    }
    found
}

#[track_caller]
fn base64(text: &str) -> Vec<u8> {
    const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    assert_eq!(text.len() % 4, 0);
    for letters in text.as_bytes().chunks(4) {
        let bits = letters.iter().fold(0u32, |bits, letter| {
            let number = LETTERS.find(char::from(*letter)).unwrap_or_else(|| {
                assert_eq!(*letter, b'=', "only base64 is in a data element");
                0
            });
            bits << 6 | number as u32
        });
        let padding = letters.iter().filter(|letter| **letter == b'=').count();
        bytes.extend(&bits.to_be_bytes()[1..4 - padding]);
    }
    bytes
}

struct Numbers<'a>(&'a [u8]);

impl<'a> Numbers<'a> {
    /// The next record: its tag and its content.
    fn record(&mut self) -> Option<(u8, &'a [u8])> {
        let (tag, rest) = self.0.split_first()?;
        self.0 = rest;
        let length = self.next() as usize;
        let (record, rest) = self.0.split_at(length);
        self.0 = rest;
        Some((*tag, record))
    }

    fn next(&mut self) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (byte, rest) = self.0.split_first().unwrap();
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if *byte < 0x80 {
                return value;
            }
        }
    }

    fn column(&mut self, rows: usize) -> Vec<u64> {
        (0..rows).map(|_| self.next()).collect()
    }
}

fn signed(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// Adds differences to the last value.
fn rising(last: &mut u64, differences: Vec<u64>) -> Vec<u64> {
    differences.into_iter().map(|difference| std::mem::replace(last, *last + difference) + difference).collect()
}

fn summed(differences: Vec<u64>) -> Vec<i64> {
    let mut sum = 0;
    differences
        .into_iter()
        .map(|difference| {
            sum += signed(difference);
            sum
        })
        .collect()
}

/// The ranges, and the numbers of their names.
fn decode_ranges(numbers: &mut Numbers<'_>) -> Vec<(Range, u64)> {
    let (rows, devices) = (numbers.next() as usize, numbers.next() as usize);
    let from = rising(&mut 0, numbers.column(rows));
    let length = numbers.column(rows);
    let began = rising(&mut 0, numbers.column(rows));
    let (duration, track, name) = (numbers.column(rows), numbers.column(rows), numbers.column(rows));
    let mut levels = vec![Vec::new(); rows];
    for _ in 0..devices {
        let (start, peak, end) = (numbers.column(rows), numbers.column(rows), numbers.column(rows));
        for (row, levels) in levels.iter_mut().enumerate() {
            levels.push([start[row], start[row] + peak[row], start[row].wrapping_add_signed(signed(end[row]))]);
        }
    }
    let range = |(row, levels): (usize, Vec<[u64; 3]>)| {
        let range = Range {
            from: from[row],
            to: from[row] + length[row],
            began: began[row],
            ended: began[row] + duration[row],
            track: track[row],
            name: String::new(),
            kind: name[row] & 3,
            levels,
        };
        (range, name[row] >> 2)
    };
    assert!(numbers.0.is_empty() && rows > 0, "the record is read to its end");
    levels.into_iter().enumerate().map(range).collect()
}

/// Decodes the element `rank-totals`.
pub(crate) fn decode_totals(bytes: &[u8]) -> Totals {
    let mut totals = Totals { order: Vec::new(), points: Vec::new(), json: Value::Null };
    let mut all = Numbers(bytes);
    while let Some((tag, record)) = all.record() {
        let mut numbers = Numbers(record);
        match tag {
            b'J' => totals.json = serde_json::from_slice(record).unwrap(),
            b'O' => {
                let rows = numbers.next() as usize;
                totals.order.extend(numbers.column(rows));
            }
            b'T' => {
                let (rows, series) = (numbers.next() as usize, numbers.next() as usize);
                let (number, time) = (rising(&mut 0, numbers.column(rows)), rising(&mut 0, numbers.column(rows)));
                let parts: Vec<Vec<i64>> = (0..series).map(|_| summed(numbers.column(rows))).collect();
                let point = |row: usize| (number[row], time[row], parts.iter().map(|part| part[row] as u64).collect());
                totals.points = (0..rows).map(point).collect();
            }
            other => panic!("a record {}", char::from(other)),
        }
    }
    totals
}

pub(crate) fn decode(bytes: &[u8]) -> PageData {
    let mut parts: BTreeMap<u64, DeviceData> = BTreeMap::new();
    let mut last: BTreeMap<(u64, u8), u64> = BTreeMap::new();
    let mut addresses: BTreeMap<(u64, u8, u64), u64> = BTreeMap::new();
    // Device, block, site, tensor.
    let mut sites: Vec<(u64, usize, u64, u64)> = Vec::new();
    let (mut phases, mut phase_seq) = (Vec::new(), 0);
    let (mut json, mut ranges) = (Value::Null, Vec::new());
    let mut reserved_value: BTreeMap<u64, u64> = BTreeMap::new();
    let mut all = Numbers(bytes);
    while let Some((tag, record)) = all.record() {
        if tag == b'J' {
            json = serde_json::from_slice(record).unwrap();
            continue;
        }
        let mut numbers = Numbers(record);
        if tag == b'A' {
            ranges = decode_ranges(&mut numbers);
            continue;
        }
        if tag == b'H' {
            let rows = numbers.next() as usize;
            let seq = rising(&mut phase_seq, numbers.column(rows));
            let (phase, step) = (numbers.column(rows), numbers.column(rows));
            phases.extend((0..rows).map(|i| (seq[i], phase[i], step[i])));
            continue;
        }
        let (number, rows) = (numbers.next(), numbers.next() as usize);
        let device = parts.entry(number).or_default();
        let last = last.entry((number, tag)).or_default();
        match tag {
            b'E' => {
                let seqs = numbers.column(rows).into_iter().map(|value| value >> 1).collect();
                device.events.extend(rising(last, seqs));
                numbers.column(rows);
            }
            b'B' | b'L' => {
                let frees = (tag == b'B').then(|| rising(last, numbers.column(rows)));
                let (lifetimes, sizes, site) = (numbers.column(rows), numbers.column(rows), numbers.column(rows));
                let first = device.blocks.len();
                for i in 0..rows {
                    let value = numbers.next();
                    let change = signed(value >> 1) * if value & 1 == 0 { 512 } else { 1 };
                    let address = addresses.entry((number, tag, site[i])).or_default();
                    *address = address.wrapping_add_signed(change);
                    let free = frees.as_ref().map(|frees| frees[i]);
                    let alloc = free.map_or(lifetimes[i], |free| free - lifetimes[i]);
                    device.blocks.push(Listed {
                        alloc,
                        free,
                        size: sizes[i],
                        address: *address,
                        category: 0,
                        module: 0,
                        custom: 0,
                    });
                }
                let tensors = numbers.column(rows);
                sites.extend((0..rows).map(|i| (number, first + i, site[i], tensors[i])));
            }
            b'P' => {
                let categories = numbers.next() as usize;
                let seq = rising(&mut 0, numbers.column(rows));
                numbers.column(rows);
                let (total, count) = (summed(numbers.column(rows)), summed(numbers.column(rows)));
                let bytes: Vec<Vec<i64>> = (0..categories).map(|_| summed(numbers.column(rows))).collect();
                device.points = (0..rows)
                    .map(|i| (seq[i], total[i] as u64, count[i], bytes.iter().map(|of| of[i]).collect()))
                    .collect();
            }
            b'S' => {
                device.segments += rows;
                (0..6).for_each(|_| drop(numbers.column(rows)));
            }
            b'R' => {
                let seq = rising(last, numbers.column(rows));
                let value = reserved_value.entry(number).or_default();
                for seq in seq {
                    *value = value.wrapping_add_signed(signed(numbers.next()));
                    device.reserved.push((seq, *value));
                }
            }
            b'U' => (0..2).for_each(|_| drop(numbers.column(rows))),
            other => panic!("a record {}", char::from(other)),
        }
        assert!(numbers.0.is_empty(), "a record {} is read to its end", char::from(tag));
    }
    let tables = &json["tables"];
    for (number, block, site, tensor) in sites {
        let block = &mut parts.get_mut(&number).unwrap().blocks[block];
        block.category = tables["sites"]["category"][site as usize].as_u64().unwrap();
        block.custom = tables["sites"]["custom"][site as usize].as_u64().unwrap();
        let held = if tensor == 0 { 0 } else { tables["tensors"][tensor as usize - 1][2].as_u64().unwrap() };
        block.module = if held > 0 { held } else { tables["sites"]["module"][site as usize].as_u64().unwrap() };
    }
    let ordinals = json["devices"].as_array().unwrap().iter().map(|device| device["device"].as_i64().unwrap());
    let devices = ordinals.enumerate().map(|(i, ordinal)| (ordinal, parts.remove(&(i as u64)).unwrap_or_default()));
    let text = |number: u64| tables["strings"][number as usize].as_str().unwrap().to_owned();
    let ranges = ranges.into_iter().map(|(range, name)| Range { name: text(name), ..range }).collect();
    PageData { devices: devices.collect(), phases, ranges, json: json.clone() }
}
