//! Snapshots in the styles of other writers: Python's pickler, PyTorch's C++ pickler, a writer that does not know
//! batches, and JSON.

// Each test uses a part of this module.
#![allow(dead_code)]

use std::fmt::Write;

/// A value of a snapshot.
#[derive(Clone, Debug)]
pub(crate) enum V {
    None,
    Int(i128),
    Float(f64),
    Bool(bool),
    Str(String),
    List(Vec<V>),
    Pair(i128, i128),
    Dict(Vec<(&'static str, V)>),
}

impl From<i128> for V {
    fn from(n: i128) -> V {
        V::Int(n)
    }
}

impl From<&str> for V {
    fn from(s: &str) -> V {
        V::Str(s.to_owned())
    }
}

/// The style of a writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pickler {
    /// Python's pickler with this protocol: it memoizes everything and writes batches except for single items.
    Python(u8),
    /// `torch::jit::Pickler`: protocol 2, memos after their values, one batch per list.
    Torch,
    /// Items one by one, tuples for lists, dictionaries and lists from marks, discarded and duplicated values.
    Odd,
}

/// The value as a pickle.
pub(crate) fn pickle(value: &V, pickler: Pickler) -> Vec<u8> {
    let protocol = if let Pickler::Python(protocol) = pickler { protocol } else { 2 };
    let mut writer = Writer { out: vec![0x80, protocol], pickler, memos: 0, words: Vec::new() };
    if protocol >= 4 {
        writer.out.push(0x95);
        writer.out.extend([0; 8]);
    }
    writer.value(value);
    writer.out.push(b'.');
    writer.out
}

struct Writer {
    out: Vec<u8>,
    pickler: Pickler,
    memos: u32,
    words: Vec<(String, u32)>,
}

impl Writer {
    fn memoize(&mut self) -> u32 {
        let n = self.memos;
        self.memos += 1;
        match self.pickler {
            Pickler::Python(4..) => self.out.push(0x94),
            _ if n < 256 => self.out.extend([b'q', n as u8]),
            _ => {
                self.out.push(b'r');
                self.out.extend(n.to_le_bytes());
            }
        }
        n
    }

    fn get(&mut self, n: u32) {
        if n < 256 {
            self.out.extend([b'h', n as u8]);
        } else {
            self.out.push(b'j');
            self.out.extend(n.to_le_bytes());
        }
    }

    fn str(&mut self, text: &str) {
        if let Some((_, memo)) = self.words.iter().find(|(word, _)| word == text) {
            return self.get(*memo);
        }
        if matches!(self.pickler, Pickler::Python(4..)) && text.len() < 256 {
            self.out.extend([0x8c, text.len() as u8]);
        } else {
            self.out.push(b'X');
            self.out.extend((text.len() as u32).to_le_bytes());
        }
        self.out.extend(text.as_bytes());
        let memo = self.memoize();
        self.words.push((text.to_owned(), memo));
    }

    fn int(&mut self, n: i128) {
        match n {
            0..=255 => self.out.extend([b'K', n as u8]),
            256..=65535 => {
                self.out.push(b'M');
                self.out.extend((n as u16).to_le_bytes());
            }
            -0x8000_0000..=0x7fff_ffff => {
                self.out.push(b'J');
                self.out.extend((n as i32).to_le_bytes());
            }
            _ => {
                self.out.extend([0x8a, 9]);
                self.out.extend(&n.to_le_bytes()[..9]);
            }
        }
    }

    fn value(&mut self, value: &V) {
        match value {
            V::Int(n) => self.int(*n),
            V::Float(n) => {
                self.out.push(b'G');
                self.out.extend(n.to_be_bytes());
            }
            V::None => self.out.push(b'N'),
            V::Bool(b) => self.out.push(if *b { 0x88 } else { 0x89 }),
            V::Str(text) => self.str(text),
            V::Pair(a, b) => {
                self.int(*a);
                self.int(*b);
                self.out.push(0x86);
                self.memoize();
            }
            V::List(items) if self.pickler == Pickler::Odd => {
                // A list that is discarded, then a tuple or a list from a mark.
                self.out.extend(b"]K\x01a0(");
                items.iter().for_each(|item| self.value(item));
                self.out.push(if items.len() % 2 == 0 { b't' } else { b'l' });
            }
            V::Dict(pairs) if self.pickler == Pickler::Odd => {
                let (first, rest) = pairs.split_at(pairs.len() / 2);
                self.out.push(b'(');
                for (key, value) in first {
                    self.str(key);
                    self.value(value);
                }
                self.out.push(b'd');
                for (key, value) in rest {
                    self.str(key);
                    self.value(value);
                    self.out.push(b's');
                }
            }
            V::List(items) => {
                self.out.push(b']');
                let python = self.pickler != Pickler::Torch;
                if python {
                    self.memoize();
                }
                let batches: Vec<&[V]> = if python { items.chunks(3).collect() } else { vec![items] };
                for batch in batches.iter().filter(|batch| !batch.is_empty()) {
                    if let ([one], true) = (batch, python) {
                        self.value(one);
                        self.out.push(b'a');
                    } else {
                        self.out.push(b'(');
                        batch.iter().for_each(|item| self.value(item));
                        self.out.push(b'e');
                    }
                }
                if !python {
                    self.memoize();
                }
            }
            V::Dict(pairs) => {
                self.out.push(b'}');
                if self.pickler != Pickler::Torch {
                    self.memoize();
                }
                if !pairs.is_empty() {
                    self.out.push(b'(');
                    for (key, value) in pairs {
                        self.str(key);
                        self.value(value);
                    }
                    self.out.push(b'u');
                }
                if self.pickler == Pickler::Torch {
                    self.memoize();
                }
            }
        }
    }
}

/// The value as JSON.
pub(crate) fn json(value: &V) -> String {
    let mut out = String::new();
    put_json(value, &mut out);
    out
}

fn put_json(value: &V, out: &mut String) {
    match value {
        V::Int(n) => write!(out, "{n}").unwrap(),
        V::Float(n) => write!(out, "{n:?}").unwrap(),
        V::None => out.push_str("null"),
        V::Bool(b) => write!(out, "{b}").unwrap(),
        V::Str(text) => out.push_str(&serde_json::to_string(text).unwrap()),
        V::Pair(a, b) => write!(out, "[{a}, {b}]").unwrap(),
        V::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                put_json(item, out);
            }
            out.push(']');
        }
        V::Dict(pairs) => {
            out.push('{');
            for (i, (key, item)) in pairs.iter().enumerate() {
                out.push_str(if i > 0 { ",\n " } else { "" });
                write!(out, "\"{key}\": ").unwrap();
                put_json(item, out);
            }
            out.push('}');
        }
    }
}

/// Compresses bytes with gzip.
pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

/// A stack of functions of one file, innermost first.
pub(crate) fn frames(names: &[&str]) -> V {
    let frame = |(line, name): (usize, &&str)| {
        V::Dict(vec![("name", (*name).into()), ("filename", "train.py".into()), ("line", V::Int(line as i128 + 1))])
    };
    V::List(names.iter().enumerate().map(frame).collect())
}

/// An event. In an `oom` event, `addr` is the free memory.
pub(crate) fn event(action: &str, addr: i128, size: i128, time: i128, stack: &[&str]) -> V {
    V::Dict(vec![
        ("action", action.into()),
        (if action == "oom" { "device_free" } else { "addr" }, V::Int(addr)),
        ("size", V::Int(size)),
        ("stream", V::Int(0)),
        ("time_us", V::Int(time)),
        ("compile_context", "N/A".into()),
        ("user_metadata", "".into()),
        ("frames", frames(stack)),
    ])
}

/// A block.
pub(crate) fn block(addr: i128, size: i128, requested: i128, state: &str, stack: &[&str]) -> V {
    V::Dict(vec![
        ("address", V::Int(addr)),
        ("size", V::Int(size)),
        ("requested_size", V::Int(requested)),
        ("state", state.into()),
        ("frames", frames(stack)),
    ])
}

/// A segment with these blocks.
pub(crate) fn segment(device: i128, addr: i128, size: i128, expandable: bool, blocks: Vec<V>) -> V {
    V::Dict(vec![
        ("device", V::Int(device)),
        ("address", V::Int(addr)),
        ("total_size", V::Int(size)),
        ("stream", V::Int(0)),
        ("segment_type", "large".into()),
        ("segment_pool_id", V::Pair(0, 0)),
        ("is_expandable", V::Bool(expandable)),
        ("frames", frames(&[])),
        ("blocks", V::List(blocks)),
    ])
}

/// A snapshot of segments and the events of each device.
pub(crate) fn snapshot(segments: Vec<V>, traces: Vec<Vec<V>>) -> V {
    V::Dict(vec![
        ("segments", V::List(segments)),
        ("device_traces", V::List(traces.into_iter().map(V::List).collect())),
        ("allocator_settings", V::Dict(vec![("PYTORCH_CUDA_ALLOC_CONF", "".into()), ("max_split_size", V::Int(-1))])),
        ("external_annotations", V::List(Vec::new())),
    ])
}
