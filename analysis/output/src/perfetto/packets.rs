//! Writes packets. Tracks are described, and texts defined, at their first use; later uses refer to them.

use std::collections::HashMap;
use std::io::{self, Write};

use prost::Message;

use super::proto::{
    CounterDescriptor, DebugAnnotation, Interned, InternedData, NEEDS_STATE, STATE_CLEARED, Trace, TracePacket,
    TrackDescriptor, TrackEvent, Type,
};

/// All packets belong to one sequence.
const SEQUENCE: u32 = 1;

/// A track of the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Track(pub(super) u64);

/// The purpose of a text. Each kind has its own numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum TextKind {
    Category,
    Name,
    Key,
    Value,
}

/// The writer of packets.
pub(super) struct PacketWriter<W: Write> {
    out: W,
    error: Option<io::Error>,
    buffer: Vec<u8>,
    /// By kind: the number of each text.
    texts: [HashMap<Box<str>, u64>; 4],
    new_texts: InternedData,
    tracks: u64,
}

/// The value of an annotation of a slice.
pub(super) enum Value<'a> {
    Number(u64),
    Text(&'a str),
}

impl<W: Write> PacketWriter<W> {
    pub(super) fn new(out: W) -> PacketWriter<W> {
        let (texts, new_texts) = (Default::default(), InternedData::default());
        let mut packets = PacketWriter { out, error: None, buffer: Vec::new(), texts, new_texts, tracks: 0 };
        packets.put(TracePacket { sequence_flags: Some(STATE_CLEARED), ..TracePacket::default() });
        packets
    }

    /// Defines a track.
    pub(super) fn track(&mut self, name: &str, parent: Option<Track>, rank: i32, descriptor: TrackDescriptor) -> Track {
        self.tracks += 1;
        let descriptor = TrackDescriptor {
            uuid: Some(self.tracks),
            name: (!name.is_empty()).then(|| name.to_owned()),
            parent_uuid: parent.map(|track| track.0),
            child_ordering: Some(3),
            sibling_order_rank: Some(rank),
            ..descriptor
        };
        self.put(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
        Track(self.tracks)
    }

    /// Defines a counter track in bytes.
    pub(super) fn counter(&mut self, name: &str, parent: Track, rank: i32) -> Track {
        let counter = Some(CounterDescriptor { unit: Some(3) });
        self.track(name, Some(parent), rank, TrackDescriptor { counter, ..TrackDescriptor::default() })
    }

    /// Sets a counter from this time on, in nanoseconds.
    pub(super) fn count(&mut self, track: Track, ns: u64, value: i64) {
        let event = TrackEvent { counter_value: Some(value), ..event(Type::Counter, track) };
        self.put_event(ns, event);
    }

    /// Writes a slice, with its times in nanoseconds. Slices of one track must come in the order of their ends and must
    /// not overlap.
    pub(super) fn slice(
        &mut self,
        track: Track,
        (from, to): (u64, u64),
        category: &str,
        name: &str,
        annotations: &[(&str, Value<'_>)],
    ) {
        let annotated = self.annotated(event(Type::SliceBegin, track), category, name, annotations);
        self.put_event(from, annotated);
        self.put_event(to.max(from), event(Type::SliceEnd, track));
    }

    /// Writes an event at one point in time, in nanoseconds.
    pub(super) fn instant(&mut self, track: Track, ns: u64, name: &str, annotations: &[(&str, Value<'_>)]) {
        let annotated = self.annotated(event(Type::Instant, track), "event", name, annotations);
        self.put_event(ns, annotated);
    }

    fn annotated(
        &mut self,
        event: TrackEvent,
        category: &str,
        name: &str,
        annotations: &[(&str, Value<'_>)],
    ) -> TrackEvent {
        let debug_annotations = annotations.iter().map(|(key, value)| {
            let name_iid = Some(self.text(TextKind::Key, key));
            match value {
                Value::Number(number) => {
                    DebugAnnotation { name_iid, uint_value: Some(*number), ..DebugAnnotation::default() }
                }
                Value::Text(text) => {
                    let text = Some(self.text(TextKind::Value, text));
                    DebugAnnotation { name_iid, string_value_iid: text, ..DebugAnnotation::default() }
                }
            }
        });
        let debug_annotations = debug_annotations.collect();
        let (category, name) = (self.text(TextKind::Category, category), self.text(TextKind::Name, name));
        TrackEvent { debug_annotations, category_iids: vec![category], name_iid: Some(name), ..event }
    }

    /// Writes everything that is buffered. Returns the first error of the output.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.drain(0);
        match self.error {
            Some(e) => Err(e),
            None => self.out.flush(),
        }
    }

    fn text(&mut self, kind: TextKind, text: &str) -> u64 {
        let numbers = &mut self.texts[kind as usize];
        if let Some(number) = numbers.get(text) {
            return *number;
        }
        let next = numbers.len() as u64 + 1;
        numbers.insert(text.into(), next);
        let list = match kind {
            TextKind::Category => &mut self.new_texts.event_categories,
            TextKind::Name => &mut self.new_texts.event_names,
            TextKind::Key => &mut self.new_texts.debug_annotation_names,
            TextKind::Value => &mut self.new_texts.debug_annotation_string_values,
        };
        list.push(Interned { iid: Some(next), text: Some(text.to_owned()) });
        next
    }

    fn put_event(&mut self, ns: u64, event: TrackEvent) {
        let new = std::mem::take(&mut self.new_texts);
        self.put(TracePacket {
            timestamp: Some(ns),
            track_event: Some(event),
            interned_data: (new != InternedData::default()).then_some(new),
            sequence_flags: Some(NEEDS_STATE),
            ..TracePacket::default()
        });
    }

    fn put(&mut self, packet: TracePacket) {
        let packet = TracePacket { trusted_packet_sequence_id: Some(SEQUENCE), ..packet };
        let trace = Trace { packet: vec![packet] };
        // Encoding to a vector cannot fail for lack of space.
        let _ = trace.encode(&mut self.buffer);
        self.drain(1 << 18);
    }

    fn drain(&mut self, above: usize) {
        if self.buffer.len() > above || above == 0 {
            if self.error.is_none() {
                self.error = self.out.write_all(&self.buffer).err();
            }
            self.buffer.clear();
        }
    }
}

fn event(r#type: Type, track: Track) -> TrackEvent {
    TrackEvent { r#type: Some(r#type as i32), track_uuid: Some(track.0), ..TrackEvent::default() }
}
