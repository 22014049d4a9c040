//! Builds events, stacks and segments from a snapshot while it is read, for both formats, pickle and JSON. It has a
//! stack of values, as Python's unpickler has, but keeps no containers. A complete container becomes a part of the
//! contents.
//!
//! A container is complete when another container takes it, or when a memo refers to it. A file that changes a complete
//! container, or refers to one from within itself, is refused. No writer of snapshots does that, and it ensures that no
//! value here can contain itself.

use super::contents::{SnapshotContents, Value};
use super::read_error::ReadError;
use super::tables::TextId;

/// The maximum distance of a memo number beyond twice the number of memos.
const MEMO_GAP: usize = 1 << 16;

/// A container that is being filled.
#[derive(Debug, Default)]
struct Container {
    is_dict: bool,
    pairs: Vec<(TextId, Value)>,
    items: Vec<Value>,
    memos: Vec<u32>,
    position: usize,
    /// The part of [`Containers::capacity_bytes`] that this container has.
    capacity_bytes: usize,
}

/// A container keeps the memory of its lists for the next one if they have at most this many bytes.
const MAX_KEPT_CAPACITY: usize = 64 << 10;

impl Container {
    /// Empties it, and returns the memory of its lists in bytes. They are kept for the next container unless they are
    /// large.
    fn empty(&mut self) -> usize {
        self.pairs.clear();
        self.items.clear();
        self.memos.clear();
        let bytes = self.pairs.capacity() * PAIR_BYTES / 2
            + self.items.capacity() * ITEM_BYTES / 2
            + self.memos.capacity() * MEMO_BYTES / 2;
        if bytes <= MAX_KEPT_CAPACITY {
            return bytes;
        }
        (self.pairs, self.items, self.memos) = Default::default();
        0
    }
}

/// The memory of one element of a container that is being filled, in bytes. A growing vector has up to twice its
/// length.
const PAIR_BYTES: usize = 2 * size_of::<(TextId, Value)>();
const ITEM_BYTES: usize = 2 * size_of::<Value>();
const MEMO_BYTES: usize = 2 * size_of::<u32>();

/// The containers that are being filled.
#[derive(Default)]
struct Containers {
    /// By the number in [`Value::Container`].
    all: Vec<Container>,
    free: Vec<u32>,
    /// The memory of what is in containers that are being filled, and of the empty lists of the others, in bytes.
    open_bytes: usize,
    capacity_bytes: usize,
}

impl Containers {
    /// The number of an empty container. `position` is its place on the stack.
    #[inline(always)]
    fn open(&mut self, is_dict: bool, position: usize) -> u32 {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                self.all.push(Container::default());
                (self.all.len() - 1) as u32
            }
        };
        let open = &mut self.all[id as usize];
        open.is_dict = is_dict;
        open.position = position;
        id
    }

    #[inline(always)]
    fn push_item(&mut self, open: usize, value: Value) {
        let items = &mut self.all[open].items;
        match (items.last_mut(), value) {
            (Some(Value::ItemRange(of, first, len)), Value::Item(kind, next))
                if *of == kind && *first + *len == next =>
            {
                *len += 1
            }
            (_, value) => {
                items.push(match value {
                    Value::Item(kind, first) => Value::ItemRange(kind, first, 1),
                    other => other,
                });
                self.open_bytes += ITEM_BYTES;
            }
        }
    }

    /// The approximate memory in use, in bytes.
    fn bytes(&self) -> usize {
        self.all.capacity() * size_of::<Container>()
            + self.free.capacity() * size_of::<u32>()
            + self.open_bytes
            + self.capacity_bytes
    }
}

/// The values that a pickle refers to by number.
#[derive(Default)]
struct Memo {
    values: Vec<Value>,
    /// The number of values, without [`Value::Absent`].
    count: usize,
}

impl Memo {
    /// Stores a value under the next number or under `number`, and returns the number.
    #[inline(always)]
    fn store(&mut self, value: Value, number: Option<u32>) -> Result<usize, ReadError> {
        let index = number.map_or(self.count, |n| n as usize);
        if index >= self.values.len() {
            if index > 2 * self.count + MEMO_GAP {
                return invalid("memo numbers are out of order");
            }
            self.values.resize(index + 1, Value::Absent);
        }
        self.count += usize::from(self.values[index] == Value::Absent);
        self.values[index] = value;
        Ok(index)
    }
}

/// Builds the contents of a snapshot.
pub(super) struct SnapshotBuilder {
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Memo,
    containers: Containers,
    pub(super) contents: SnapshotContents,
}

fn invalid<T>(what: &str) -> Result<T, ReadError> {
    Err(ReadError::Invalid(format!("its structure is invalid: {what}")))
}

impl SnapshotBuilder {
    pub(super) fn new() -> SnapshotBuilder {
        SnapshotBuilder {
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            containers: Containers::default(),
            contents: SnapshotContents::new(),
        }
    }

    /// The approximate memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let values = self.stack.capacity() + self.memo.values.capacity();
        values * size_of::<Value>()
            + self.marks.capacity() * size_of::<usize>()
            + self.containers.bytes()
            + self.contents.bytes()
    }

    #[inline(always)]
    pub(super) fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    /// Pushes a text, known or new.
    #[inline]
    pub(super) fn push_text(&mut self, bytes: &[u8]) {
        let id = self.contents.tables.text(bytes);
        self.stack.push(Value::Text(id));
    }

    /// Pushes an empty container.
    #[inline]
    pub(super) fn open(&mut self, is_dict: bool) {
        let id = self.containers.open(is_dict, self.stack.len());
        self.stack.push(Value::Container(id));
    }

    #[inline(always)]
    pub(super) fn mark(&mut self) {
        self.marks.push(self.stack.len());
    }

    fn pop_mark(&mut self) -> Result<usize, ReadError> {
        match self.marks.pop() {
            Some(mark) if mark <= self.stack.len() => Ok(mark),
            _ => invalid("a batch has no mark"),
        }
    }

    /// The lowest stack position that may be popped. Values below it belong to a batch that is being filled.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Pops the topmost value and completes it.
    fn pop(&mut self) -> Result<Value, ReadError> {
        if self.stack.len() <= self.floor() {
            return invalid("a value is missing");
        }
        let value = self.stack.pop().unwrap_or(Value::None);
        Ok(self.complete(value))
    }

    /// Discards the topmost value, or the topmost mark.
    pub(super) fn drop_top(&mut self) -> Result<(), ReadError> {
        if self.marks.last() == Some(&self.stack.len()) {
            self.marks.pop();
            return Ok(());
        }
        self.pop().map(|_| ())
    }

    /// Discards everything above the topmost mark.
    pub(super) fn drop_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        while self.stack.len() > mark {
            self.pop()?;
        }
        Ok(())
    }

    /// Duplicates the topmost value.
    pub(super) fn duplicate_top(&mut self) -> Result<(), ReadError> {
        let value = self.pop()?;
        self.stack.push(value);
        self.stack.push(value);
        Ok(())
    }

    /// Stores the topmost value in the memo, under the next number or under `number`.
    #[inline]
    pub(super) fn memoize(&mut self, number: Option<u32>) -> Result<(), ReadError> {
        let Some(&value) = self.stack.last() else { return invalid("a memo has no value") };
        let index = self.memo.store(value, number)?;
        if let Value::Container(id) = value {
            self.containers.all[id as usize].memos.push(index as u32);
            self.containers.open_bytes += MEMO_BYTES;
        }
        Ok(())
    }

    /// Pushes the value of a memo.
    #[inline]
    pub(super) fn recall(&mut self, number: u32) -> Result<(), ReadError> {
        let mut value = self.memo.values.get(number as usize).copied().unwrap_or(Value::Absent);
        if let Value::Container(id) = value {
            let position = self.containers.all[id as usize].position;
            value = self.complete(value);
            self.stack[position] = value;
        }
        if value == Value::Absent {
            return invalid("a memo is not defined");
        }
        self.stack.push(value);
        Ok(())
    }

    /// The open container at this stack position. Fails if there is none, or if it is complete.
    #[inline]
    fn open_at(&self, position: usize, is_dict: bool) -> Result<usize, ReadError> {
        match self.stack.get(position) {
            Some(Value::Container(id)) if self.containers.all[*id as usize].is_dict == is_dict => Ok(*id as usize),
            _ => invalid("a value is added to something that is not an open container"),
        }
    }

    /// Does `container[key] = value`.
    pub(super) fn set_item(&mut self) -> Result<(), ReadError> {
        let (value, key) = (self.pop()?, self.pop()?);
        let open = self.open_at(self.stack.len().wrapping_sub(1), true)?;
        self.insert_pair(open, key, value);
        Ok(())
    }

    /// Does `container[key] = value` for all pairs above the topmost mark.
    #[inline]
    pub(super) fn set_items(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        if !(self.stack.len() - mark).is_multiple_of(2) {
            return invalid("a key has no value");
        }
        let open = self.open_at(mark.wrapping_sub(1), true)?;
        for at in (mark..self.stack.len()).step_by(2) {
            let (key, value) = (self.stack[at], self.complete(self.stack[at + 1]));
            self.insert_pair(open, key, value);
        }
        self.stack.truncate(mark);
        Ok(())
    }

    #[inline]
    fn insert_pair(&mut self, open: usize, key: Value, value: Value) {
        match key {
            Value::Text(key) => {
                self.containers.all[open].pairs.push((key, value));
                self.containers.open_bytes += PAIR_BYTES;
            }
            // All keys of a snapshot are texts, so other keys are ignored.
            other => drop(self.complete(other)),
        }
    }

    /// Does `list.append(value)`.
    pub(super) fn append(&mut self) -> Result<(), ReadError> {
        let value = self.pop()?;
        let open = self.open_at(self.stack.len().wrapping_sub(1), false)?;
        self.containers.push_item(open, value);
        Ok(())
    }

    /// Does `list.append(value)` for all values above the topmost mark.
    #[inline]
    pub(super) fn append_all(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        let open = self.open_at(mark.wrapping_sub(1), false)?;
        for at in mark..self.stack.len() {
            let value = self.complete(self.stack[at]);
            self.containers.push_item(open, value);
        }
        self.stack.truncate(mark);
        Ok(())
    }

    /// Makes a list of all values above the topmost mark.
    pub(super) fn list_of_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        self.container_of_batch(mark, false)
    }

    /// Makes a tuple of the topmost `len` values, or of all values above the topmost mark.
    pub(super) fn tuple(&mut self, len: Option<usize>) -> Result<(), ReadError> {
        let mark = match len {
            Some(len) if self.stack.len() >= self.floor() + len => self.stack.len() - len,
            Some(_) => return invalid("a value is missing"),
            None => self.pop_mark()?,
        };
        if let [Value::Int(first), Value::Int(second)] = self.stack[mark..] {
            let pair = self.contents.add_pair(first as u64, second as u64);
            self.stack.truncate(mark);
            self.stack.push(pair);
            return Ok(());
        }
        self.container_of_batch(mark, false)
    }

    /// Makes a dictionary of all values above the topmost mark.
    pub(super) fn dict_of_batch(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        self.container_of_batch(mark, true)
    }

    fn container_of_batch(&mut self, mark: usize, is_dict: bool) -> Result<(), ReadError> {
        let mut batch = self.stack.split_off(mark);
        if is_dict && !batch.len().is_multiple_of(2) {
            return invalid("a key has no value");
        }
        for value in &mut batch {
            *value = self.complete(*value);
        }
        self.open(is_dict);
        let open = self.open_at(mark, is_dict)?;
        if is_dict {
            batch.chunks_exact(2).for_each(|pair| self.insert_pair(open, pair[0], pair[1]));
        } else {
            batch.iter().for_each(|value| self.containers.push_item(open, *value));
        }
        Ok(())
    }

    /// Pops the result when everything has been read.
    pub(super) fn finish(&mut self) -> Result<Value, ReadError> {
        self.pop()
    }

    /// Completes a container and returns what it represents; other values are returned unchanged. A complete container
    /// takes no more items.
    #[inline]
    fn complete(&mut self, value: Value) -> Value {
        let Value::Container(id) = value else { return value };
        let mut open = std::mem::take(&mut self.containers.all[id as usize]);
        self.containers.open_bytes -=
            open.pairs.len() * PAIR_BYTES + open.items.len() * ITEM_BYTES + open.memos.len() * MEMO_BYTES;
        let value = if open.is_dict {
            self.contents.complete_dict(&open.pairs)
        } else {
            self.contents.complete_list(&open.items)
        };
        for memo in open.memos.drain(..) {
            if self.memo.values[memo as usize] == Value::Container(id) {
                self.memo.values[memo as usize] = value;
            }
        }
        let capacity_bytes = open.empty();
        self.containers.capacity_bytes = self.containers.capacity_bytes - open.capacity_bytes + capacity_bytes;
        open.capacity_bytes = capacity_bytes;
        self.containers.all[id as usize] = open;
        self.containers.free.push(id);
        value
    }

    /// Builds a snapshot from a file that ends early or is damaged. It keeps the events, segments and lists that are
    /// complete. Returns whether there is a snapshot.
    pub(super) fn salvage(&mut self) -> bool {
        if !matches!(self.stack.first(), Some(Value::Container(_))) {
            return false;
        }
        // There is one batch per container that was being filled, from the outermost. Lists in lists in the top-level
        // dictionary are valid, only their ends are missing.
        let is_list = |builder: &SnapshotBuilder, mark: usize| builder.open_at(mark.wrapping_sub(1), false).is_ok();
        let outer = (1..self.marks.len().min(3)).take_while(|level| is_list(self, self.marks[*level])).count() + 1;
        if let Some(inner) = self.marks.get(outer).copied() {
            self.marks.truncate(outer);
            // The incomplete container itself is also discarded.
            self.stack.truncate(inner.saturating_sub(1).max(self.floor()));
        }
        while self.marks.len() > 1 {
            if self.append_all().is_err() {
                return false;
            }
        }
        if self.open_at(0, false).is_ok() {
            self.marks.truncate(1);
            return self.marks.is_empty() || self.append_all().is_ok();
        }
        let Ok(top) = self.open_at(0, true) else { return false };
        let start = self.marks.pop().unwrap_or(1).max(1);
        let mut at = start;
        while let Some(Value::Text(key)) = self.stack.get(at).copied() {
            let first = at + 1;
            at = first;
            // A single value of a list has no batch. It lies behind its list on the stack, not yet added, and the list
            // can itself be such a value.
            while self.stack.get(at).is_some_and(|value| !matches!(value, Value::Text(_))) {
                at += 1;
            }
            for position in (first + 1..at).rev() {
                let value = self.complete(self.stack[position]);
                let Ok(list) = self.open_at(position - 1, false) else { continue };
                self.containers.push_item(list, value);
            }
            if first < at {
                let value = self.complete(self.stack[first]);
                self.insert_pair(top, Value::Text(key), value);
            }
        }
        self.stack.truncate(1);
        true
    }

    /// The two topmost texts, joined with a dot: what `STACK_GLOBAL` would import.
    pub(super) fn import_name(&self) -> String {
        let names: Vec<&str> = self
            .stack
            .iter()
            .rev()
            .take(2)
            .rev()
            .map(|value| if let Value::Text(id) = value { self.contents.tables.str(*id) } else { "?" })
            .collect();
        memtrace_trace::printable::line(&names.join(".")).chars().take(160).collect()
    }
}
