//! `run.json` and `symbols.json` are read exactly as they were written, whatever their content.

use std::collections::BTreeMap;

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{
    AttachedRun, BoundingRun, Discovery, EstimatedWorkspaces, Exit, GuessedBranch, GuessedKind, GuessedSize, Machine,
    Manifest, ManifestNotice, ManifestProcess, MissingFunction, PeakBounds, RunState, SimulatedGpus,
    UnrecordableProcess, ValueException,
};
use memtrace_analysis::symbols::{SYMBOLS_FILE, Symbols};
use memtrace_trace::file::{Definitions, Module, NativeFrame};
use memtrace_trace::ids::{FrameId, ModuleId};
use proptest::prelude::*;
use serde_json::json;

fn exit() -> impl Strategy<Value = Exit> {
    any::<[Option<i32>; 2]>().prop_map(|[code, signal]| Exit { code, signal })
}

fn names() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map("[A-Z_]{1,12}", ".{0,20}", 0..4)
}

fn process() -> impl Strategy<Value = ManifestProcess> {
    let words = prop::collection::vec(".{0,12}", 0..4);
    let counts = any::<[u64; 2]>();
    (any::<u32>(), any::<Option<u32>>(), words, names(), exit(), prop::option::of("[0-9]{1,6}[.]mtr"), counts).prop_map(
        |(pid, ppid, argv, env, exit, trace, [bytes, events])| ManifestProcess {
            pid,
            ppid,
            argv,
            env,
            exit,
            trace,
            bytes,
            events,
            rank: ppid,
            recording_started_ns: bytes,
            lost: events,
            counters: BTreeMap::from([("panics".to_owned(), events)]),
            notices: vec![ManifestNotice { text: format!("{pid}"), ..ManifestNotice::default() }],
            ..ManifestProcess::default()
        },
    )
}

fn manifest() -> impl Strategy<Value = Manifest> {
    let words = prop::collection::vec(".{0,12}", 0..4);
    let losses = prop::collection::btree_map("[a-z_]{1,12}", any::<u64>(), 0..4);
    let text = || prop::option::of(".{0,20}");
    let numbers = (any::<Option<u32>>(), any::<[Option<u64>; 2]>());
    (words, text(), text(), numbers, exit(), prop::collection::vec(process(), 0..4), losses, ".{0,9}").prop_map(
        |(command, directory, host, (pid, times), exit, processes, losses, note)| Manifest {
            memtrace: "0.1.0".into(),
            command,
            directory,
            host,
            pid,
            started_ns: times[0],
            ended_ns: times[1],
            exit,
            processes,
            losses,
            state: note.is_empty().then_some(RunState::Ended),
            refused: BTreeMap::from([(note.clone(), 3)]),
            unrecordable: vec![UnrecordableProcess { pid: 9, program: note.clone(), ..UnrecordableProcess::default() }],
            job: Some(note.clone()),
            unlisted: 4,
            changed_traces: Vec::new(),
            limit_bytes: note.is_empty().then_some(24 << 30),
            attached: pid.map(|pid| AttachedRun { ran_ns: times[0], stopped_ns: times[1], loading_ns: pid.into() }),
            unchecked: 5,
            simulated: (note.len() % 2 == 1).then(|| SimulatedGpus {
                gpu: note.clone(),
                memory_bytes: 80 << 30,
                count: 2,
                exception: (note.len() % 4 == 1).then(|| ValueException {
                    exception: note.clone(),
                    location: "train.py:3".to_owned(),
                    read_location: note.clone(),
                }),
                workspaces: (note.len() % 4 == 1).then_some(EstimatedWorkspaces {
                    convolutions: 9,
                    estimated: 2,
                    above_bytes: 5 << 20,
                    below_bytes: 0,
                }),
                missing_functions: (note.len() % 4 == 1)
                    .then(|| MissingFunction { name: note.clone(), calls: 3 })
                    .into_iter()
                    .collect(),
                guessed_sizes: (note.len() % 4 == 1)
                    .then(|| GuessedSize { location: note.clone(), selected: 3, total: 7, ..GuessedSize::default() })
                    .into_iter()
                    .collect(),
                guessed_branches: (note.len() % 4 == 1)
                    .then(|| GuessedBranch {
                        location: note.clone(),
                        kind: GuessedKind::Size,
                        optimizer: Some(note.clone()),
                        times: 4,
                    })
                    .into_iter()
                    .collect(),
                bounds: (note.len() % 4 == 1).then(|| PeakBounds {
                    smallest: BoundingRun::default(),
                    largest: BoundingRun {
                        allocated_bytes: 3,
                        reserved_bytes: 4,
                        is_out_of_memory: true,
                        has_failed: true,
                    },
                }),
                was_ready: note.len() % 4 == 1,
            }),
            version: 2,
            started: Some(note.clone()),
            ended: None,
            discovery: note.is_empty().then_some(Discovery::KernelReports),
            machine: Some(Machine { name: note, ..Machine::default() }),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_manifest(manifest in manifest()) {
        let folder = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(folder.path()).unwrap();
        manifest.write(&folder).unwrap();
        prop_assert_eq!(Manifest::read(&folder).unwrap(), Some(manifest));
    }

    #[test]
    fn symbols(
        strings in prop::collection::vec("[a-zA-Z_<>.]{1,20}", 1..6),
        places in prop::collection::btree_map(
            1u64..,
            prop::collection::vec((0u32..6, 0u32..6, any::<u32>()), 0..4),
            1..8,
        ),
    ) {
        let written: BTreeMap<String, _> = places.iter().map(|(at, frames)| (format!("{at:x}"), frames)).collect();
        let object = json!({ "path": "/lib/a.so", "build_id": "00ff", "strings": strings, "places": written });
        let folder = tempfile::tempdir().unwrap();
        let put = |text: String| {
            std::fs::write(folder.path().join(SYMBOLS_FILE), text).unwrap();
            Symbols::read(&RunFolder::open(folder.path()).unwrap()).unwrap().unwrap()
        };
        let read = put(json!({ "version": 1, "objects": [object] }).to_string());
        prop_assert_eq!(&put(read.to_json()), &read);

        let module = Module { path: "/lib/a.so".into(), build_id: "00ff".into() };
        let mut all = Definitions { modules: vec![Module::default(), module], ..Definitions::default() };
        for (index, address) in places.keys().enumerate() {
            let place = NativeFrame { module: ModuleId(1), address: *address };
            all.native_frames.insert(FrameId(index as u32 + 1), place);
        }
        read.symbolize(&mut all, &memtrace_trace::file::Budget::default());
        // The innermost frame of each place is the one in the file.
        for (index, (address, frames)) in places.iter().enumerate() {
            let Some(frame) = all.frame(FrameId(index as u32 + 1)) else { panic!("{address:x} has no frame") };
            let text = |at: u32| strings.get(at as usize).map(String::as_str);
            let name = frames.first().and_then(|(name, ..)| text(*name));
            let name = name.map_or(format!("a.so+{address:#x}"), str::to_owned);
            // Names that are neither C++ nor Rust names stay unchanged.
            if !name.starts_with('_') {
                prop_assert_eq!(&*frame.name, &*name);
            }
            prop_assert_eq!(frame.line, frames.first().map_or(0, |(.., line)| *line));
        }
    }
}
