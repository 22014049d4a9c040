//! Round trips of every kind of record with arbitrary contents, alone and in a file.

use std::collections::BTreeMap;

use memtrace_trace::api::Api;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter};
use memtrace_trace::definition::{Definition, LabelOrigin, MAX_DEFINITION, NoticeStatus, ScanOccasion, TensorKind};
use memtrace_trace::event::{Action, Event, Flags, SLOT_WORDS, Slot, Source};
use memtrace_trace::file::{Cycle, End, Holder, HolderScan, NnName, Reader, TensorName, Writer};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use memtrace_trace::options::{Cpu, Options, Stacks};
use memtrace_trace::rotation::Rotation;
use memtrace_trace::shm::handshake::Hello;
use memtrace_trace::shm::ring::{Consumer, Producer, Record};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::shm::validation;
use memtrace_trace::wire::Cursor;
use proptest::prelude::*;

/// A definition that owns its strings.
#[derive(Clone, Debug)]
struct Owned {
    kind: u8,
    id: u32,
    small: [u32; 3],
    large: [u64; 2],
    texts: [String; 3],
}

const KINDS: u8 = 23;
const TENSOR_KINDS: [TensorKind; 5] =
    [TensorKind::Other, TensorKind::Parameter, TensorKind::Buffer, TensorKind::Gradient, TensorKind::OptimizerState];

impl Owned {
    fn definition(&self) -> Definition<'_> {
        let Owned { kind, id, small: [a, b, _], large: [x, y], texts: [s, t, u] } = self;
        match kind {
            0 => Definition::Frame { id: FrameId(*id), name: s, qualname: t, filename: u, line: *a, first_line: *b },
            1 => Definition::Stack { id: StackId(*id), parent: StackId(a % id), frame: FrameId(*b) },
            2 => Definition::Context { id: ContextId(*id), node: s, forward: StackId(*a), module: ContextId(*b) },
            3 => Definition::Module { id: ModuleId(*id), path: s, build_id: t },
            4 => Definition::Thread { id: ThreadId(*id), tid: *a, name: s },
            5 => Definition::Pool { id: *id as u16, pool: (*x, *y) },
            6 => Definition::Device { ordinal: *id, name: s, total: *x, used_before: *y, pci: t },
            7 => Definition::NativeFrame { id: FrameId(*id), module: ModuleId(*a), address: *x },
            8 => Definition::Rank { rank: *a, size: *b },
            10 => Definition::NnCall { id: ContextId(*id), caller: ContextId(a % id), object: *x, class: s },
            11 => Definition::NnName { object: *x, seq: *y, class: s, name: t },
            12 => {
                Definition::TensorName { address: *x, seq: *y, kind: TENSOR_KINDS[*a as usize % 5], name: s, shape: t }
            }
            13 => {
                let origins = [LabelOrigin::RecordFunction, LabelOrigin::Nvtx, LabelOrigin::Annotation];
                let origin = origins[*a as usize % origins.len()];
                Definition::Label { id: *id, origin, text: s }
            }
            14 => Definition::Cycle { address: *x, seq: *y, file: s, text: t },
            15 => Definition::Holder { address: *x, seq: *y, path: s, shape: s },
            16 => {
                let occasion = [ScanOccasion::Running, ScanOccasion::OutOfMemory, ScanOccasion::End][*a as usize % 3];
                Definition::HolderScan { seq: *x, occasion, objects: *y, is_partial: b % 2 == 1 }
            }
            17 => Definition::Rotation { rotation: self.rotation() },
            18 => Definition::PackedRotation { rotation: self.rotation(), progress: s.as_bytes() },
            19 => Definition::PackedBlock { block: s.as_bytes() },
            20 => Definition::EngineAttribute { path: s, value: t },
            21 => Definition::CacheUse {
                ticks: *x,
                used: *y,
                size: *x ^ *y,
                requests: u64::from(*a),
                readings: u64::from(*b),
                sum: *y,
                full: u64::from(*b),
                preempted: *x,
                ended: *y,
            },
            9 => Definition::FrameOrigin { frame: FrameId(*id), position: *b, name: s, filename: t, line: *a },
            _ => {
                let status = [NoticeStatus::Remark, NoticeStatus::Works, NoticeStatus::Off][*a as usize % 3];
                Definition::Notice { topic: s, text: t, status }
            }
        }
    }

    fn rotation(&self) -> Rotation {
        let ([x, y], [a, b, c]) = (self.large, self.small);
        Rotation { first_seq: x, dropped: y, recreating: a.into(), dropped_ticks: (b.into(), c.into()) }
    }

    fn encoded(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.definition().encode(&mut bytes);
        bytes
    }
}

fn definition() -> impl Strategy<Value = Owned> {
    let text = prop_oneof![".{0,12}", "[a-zA-Z_<>./ ]{0,40}", ".{200,400}"];
    (0..KINDS, 1u32..2_000, any::<[u32; 3]>(), any::<[u64; 2]>(), [text.clone(), text.clone(), text])
        .prop_map(|(kind, id, small, large, texts)| Owned { kind, id, small, large, texts })
}

/// An arbitrary event that a hook can create. No allocation has a size of `u64::MAX`, which the file's columns cannot
/// store.
fn event() -> impl Strategy<Value = Event> {
    let word = prop_oneof![0u64..8, any::<u64>().prop_map(|v| v >> 1)];
    let words = prop::collection::vec(word, 5);
    (words, any::<[u32; 5]>(), any::<i16>(), any::<[u16; 2]>(), any::<i32>(), 0u8..6, 0u8..25).prop_filter_map(
        "a known action",
        |(w, i, device, n, result, source, action)| {
            let source = Source::from_wire(source.into())?;
            let torch = source.is_torch();
            let flags = Flags(n[0]);
            Some(Event {
                seq: w[0],
                ticks: w[1],
                addr: w[2],
                size: w[3],
                stream: w[4],
                stack: StackId(i[0]),
                context: ContextId(i[1]),
                source,
                action: Action::from_wire(action.into())?,
                device,
                flags,
                api: if torch { Api::NONE } else { Api(n[1]) },
                pool: if torch { n[1] } else { 0 },
                slack: if torch && flags.contains(Flags::SLACK_KNOWN) { i[2] } else { 0 },
                result: if torch { 0 } else { result },
                module: ModuleId(i[3]),
                thread: ThreadId(i[4] % 9),
            })
        },
    )
}

/// Passes slots and definitions through a real segment, as launcher and traced process share it.
fn through_a_ring(slots: &[Slot], definitions: &[Vec<u8>]) -> (Vec<Slot>, Vec<Vec<u8>>) {
    use std::os::fd::AsFd;
    let (ours, fd) = Segment::create().unwrap();
    let theirs = Segment::map(fd.as_fd()).unwrap();
    let mut producer = Producer::new(theirs.ring(3).unwrap());
    for (index, slot) in slots.iter().enumerate() {
        producer.write(slot).unwrap();
        if let Some(definition) = definitions.get(index) {
            producer.write_definition(definition).unwrap();
        }
    }
    producer.publish();
    let (mut events, mut others) = (Vec::new(), Vec::new());
    let take = |record: Record<'_>| match record {
        Record::Event(slot) => events.push(slot),
        Record::Definition(bytes) => others.push(bytes.to_vec()),
    };
    Consumer::new(ours.ring(3).unwrap()).drain(take).unwrap();
    (events, others)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn definitions_round_trip(all in prop::collection::vec(definition(), 0..40)) {
        let bytes: Vec<u8> = all.iter().flat_map(Owned::encoded).collect();
        let mut cursor = Cursor::new(&bytes);
        for one in &all {
            prop_assert_eq!(Definition::decode(&mut cursor).unwrap(), Some(one.definition()));
        }
        prop_assert!(cursor.is_empty());
        for one in &all {
            let bytes = one.encoded();
            let is_valid = ![4, 17, 18, 19].contains(&one.kind) && bytes.len() <= MAX_DEFINITION;
            let expected = is_valid.then(|| one.definition());
            prop_assert_eq!(validation::decode_definition(&bytes), expected);
            // No prefix is a valid definition.
            for cut in 0..bytes.len() {
                prop_assert!(Definition::decode(&mut Cursor::new(&bytes[..cut])).is_err(), "cut at {}", cut);
            }
        }
    }

    #[test]
    fn slots_and_definitions_round_trip_through_shared_memory(
        events in prop::collection::vec(event(), 1..30),
        definitions in prop::collection::vec(definition(), 0..20),
    ) {
        let slots: Vec<Slot> = events.iter().map(Event::to_slot).collect();
        let encoded: Vec<_> = definitions.iter().take(slots.len()).map(Owned::encoded).collect();
        prop_assert_eq!(through_a_ring(&slots, &encoded), (slots.clone(), encoded));
        for (slot, event) in slots.iter().zip(&events) {
            prop_assert_eq!(Event::from_slot(slot, event.thread), Some(*event));
        }
        prop_assert_eq!(slots[0].len(), SLOT_WORDS);
    }

    #[test]
    fn a_file_round_trips(
        info in ".{0,60}",
        events in prop::collection::vec(event(), 0..200),
        definitions in prop::collection::vec(definition(), 0..60),
        flushes in prop::collection::vec(any::<bool>(), 200),
        clock in prop::collection::vec(any::<[u64; 3]>(), 0..4),
        counters in prop::collection::vec(any::<u64>(), COUNTER_SLOTS),
        end in (any::<Option<i32>>(), any::<[u64; 2]>(), ".{0,20}"),
    ) {
        let mut writer = Writer::new(Vec::new(), &info).unwrap();
        for one in &definitions {
            writer.definition(&one.encoded()).unwrap();
        }
        let clock: Vec<ClockPoint> = clock
            .iter()
            .map(|&[ticks, monotonic_ns, realtime_ns]| ClockPoint { ticks, monotonic_ns, realtime_ns })
            .collect();
        for point in &clock {
            writer.clock(*point).unwrap();
        }
        for (event, flush) in events.iter().zip(flushes) {
            writer.event(event).unwrap();
            if flush {
                writer.flush().unwrap();
            }
        }
        writer.counters(&counters.clone().try_into().unwrap()).unwrap();
        let end = End { wait_status: end.0, lost: end.1[0], late: end.1[1], reason: end.2 };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("7.mtr");
        std::fs::write(&path, writer.finish(&end).unwrap()).unwrap();

        let reader = Reader::open(&path).unwrap();
        prop_assert!(reader.damage().is_none(), "{:?}", reader.damage());
        prop_assert_eq!(reader.info(), &info);
        prop_assert_eq!(reader.clock_points(), clock);
        for counter in Counter::ALL {
            prop_assert_eq!(reader.counter(counter), counters[counter as usize]);
        }
        prop_assert_eq!(reader.end(), Some(&end));
        let read: Vec<Event> = reader.events().flat_map(|block| block.unwrap()).collect();
        prop_assert!(read == events);

        // The last definition of an id is valid.
        let mut last: BTreeMap<(u8, u32), &Owned> = BTreeMap::new();
        for one in &definitions {
            // Pools have ids of 16 bits. Frames and native frames share their ids but have separate tables.
            last.insert((one.kind, one.id), one);
        }
        let all = reader.definitions();
        for one in last.values() {
            match one.definition() {
                Definition::Frame { id, name, qualname, filename, line, first_line } => {
                    let found = &all.frames[id.index()];
                    prop_assert_eq!((&*found.name, &*found.qualname, &*found.filename), (name, qualname, filename));
                    prop_assert_eq!((found.line, found.first_line), (line, first_line));
                }
                Definition::Stack { id, parent, frame } => {
                    prop_assert_eq!((all.stacks[id.index()].parent, all.stacks[id.index()].frame), (parent, frame));
                }
                Definition::Context { id, node, forward, module } => {
                    let found = &all.contexts[id.index()];
                    prop_assert_eq!((&*found.node, found.forward, found.module), (node, forward, module));
                }
                Definition::NnCall { id, caller, object, class } => {
                    let found = &all.nn_calls[&id];
                    prop_assert_eq!((found.caller, found.object, &*found.class), (caller, object, class));
                }
                Definition::NnName { object, seq, class, name } => {
                    let is = |n: &NnName| (n.object, n.seq, &*n.class, &*n.name) == (object, seq, class, name);
                    prop_assert!(all.nn_names.iter().any(is));
                }
                Definition::TensorName { address, seq, kind, name, shape } => {
                    let expected = TensorName { address, seq, kind, name: name.into(), shape: shape.into() };
                    prop_assert!(all.tensor_names.contains(&expected));
                }
                Definition::Cycle { address, seq, file, text } => {
                    let expected = Cycle { address, seq, file: file.into(), text: text.into() };
                    prop_assert!(all.cycles.contains(&expected));
                }
                Definition::Holder { address, seq, path, shape } => {
                    let expected = Holder { address, seq, path: path.into(), shape: shape.into() };
                    prop_assert!(all.holders.contains(&expected));
                }
                Definition::HolderScan { seq, occasion, objects, is_partial } => {
                    let expected = HolderScan { seq, occasion, objects, is_partial };
                    prop_assert!(all.holder_scans.contains(&expected));
                }
                Definition::Label { id, origin, text } => {
                    prop_assert_eq!((all.labels[&id].origin, &*all.labels[&id].text), (origin, text));
                }
                Definition::Module { id, path, build_id } => {
                    let found = &all.modules[id.index()];
                    prop_assert_eq!((&*found.path, &*found.build_id), (path, build_id));
                }
                Definition::Thread { id, tid, name } => {
                    prop_assert_eq!((all.threads[id.index()].tid, &*all.threads[id.index()].name), (tid, name));
                }
                Definition::Pool { id, pool } => prop_assert_eq!(all.pools.get(&id), Some(&pool)),
                Definition::Device { ordinal, name, total, used_before, pci } => {
                    let found = &all.devices[&ordinal];
                    let found = (&*found.name, found.total, found.used_before, &*found.pci);
                    prop_assert_eq!(found, (name, total, used_before, pci));
                }
                Definition::NativeFrame { id, module, address } => {
                    prop_assert_eq!((all.native_frames[&id].module, all.native_frames[&id].address), (module, address));
                }
                Definition::FrameOrigin { frame, position, name, filename, line } => {
                    let found = &all.frame_origins[&(frame, position)];
                    prop_assert_eq!((&*found.name, &*found.filename, found.line), (name, filename, line));
                }
                Definition::CacheUse { ticks, used, .. } => {
                    prop_assert!(all.cache_uses.iter().any(|found| (found.ticks, found.used) == (ticks, used)));
                }
                Definition::Rank { .. }
                | Definition::Rotation { .. }
                | Definition::PackedRotation { .. }
                | Definition::PackedBlock { .. } => {}
                Definition::EngineAttribute { path, value } => {
                    let mut found = all.engine_attributes.iter();
                    prop_assert!(found.any(|found| *found.path == *path && *found.value == *value));
                }
                Definition::Notice { topic, text, .. } => {
                    prop_assert!(all.notices.iter().any(|found| *found.topic == *topic && *found.text == *text));
                }
            }
        }
        let first = definitions.iter().find(|one| one.kind == 8).map(|one| (one.small[0], one.small[1]));
        prop_assert_eq!(all.rank, first);
        let rotation = definitions.iter().rfind(|one| matches!(one.kind, 17 | 18)).map(Owned::rotation);
        prop_assert_eq!(all.rotation, rotation);
        let from = definitions.iter().rposition(|one| one.kind == 17).map_or(0, |at| at + 1);
        let packed = definitions[from..].iter().filter(|one| one.kind == 19).map(|one| one.texts[0].as_bytes().into());
        prop_assert_eq!(all.packed_state.clone().unwrap_or_default().blocks, packed.collect::<Vec<Box<[u8]>>>());
    }

    #[test]
    fn the_handshake_round_trips(
        generation: u32,
        token in "[0-9a-f]{1,64}",
        cpu in 0usize..3,
        stacks in 0usize..4,
        names: bool,
        folder in proptest::option::of("/[^\\x00]{0,40}"),
    ) {
        let hello = Hello::new(generation);
        prop_assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        let cpu = [Cpu::Auto, Cpu::Always, Cpu::Never][cpu];
        let stacks = [Stacks::Python, Stacks::Native, Stacks::Both, Stacks::None][stacks];
        let (cycles, folder) = (!names, folder.map(Into::into));
        let options = Options { cpu, stacks, names, folder, cycles, filters: generation, ..Options::new(token) };
        prop_assert_eq!(Options::parse(&options.encode()), Some(options));
    }
}
