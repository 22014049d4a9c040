//! The names that memtrace gives tensors and modules, against PyTorch's: `named_parameters()`, `named_buffers()`,
//! `.grad`, `optimizer.state` and `named_modules()`, which the program itself calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use memtrace_analysis::load::TraceRecording;
use memtrace_analysis::model::{Names, Recording};
use memtrace_tests::snapshots::{pickle, vizcheck};
use memtrace_tests::traced_program::{Run, TracedProgram, events, root};
use memtrace_tests::versions::Versions;
use memtrace_trace::definition::{NoticeStatus, TRAINING_TOPIC, TensorKind};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Definitions, Reader};
use serde_json::Value;

/// Kind, name, address, and data type with shape.
type Tensor = (TensorKind, String, u64, String);
/// Address of the object, class, path.
type Module = (u64, String, String);

#[derive(Default, Debug)]
struct NamedObjects {
    tensors: BTreeSet<Tensor>,
    modules: BTreeSet<Module>,
}

impl NamedObjects {
    /// Kinds and names, without addresses.
    fn names(&self) -> BTreeSet<(TensorKind, &str)> {
        self.tensors.iter().map(|(kind, name, ..)| (*kind, &**name)).collect()
    }

    fn count(&self, kind: TensorKind) -> usize {
        self.names().iter().filter(|(k, _)| *k == kind).count()
    }

    fn of(definitions: &Definitions) -> NamedObjects {
        let tensor =
            |n: &memtrace_trace::file::TensorName| (n.kind, n.name.to_string(), n.address, n.shape.to_string());
        let module = |n: &memtrace_trace::file::NnName| (n.object, n.class.to_string(), n.name.to_string());
        NamedObjects {
            tensors: definitions.tensor_names.iter().map(tensor).collect(),
            modules: definitions.nn_names.iter().map(module).collect(),
        }
    }

    /// Parses the list that the program wrote.
    fn read(path: &Path) -> NamedObjects {
        let text = std::fs::read_to_string(path).expect("the program's own list");
        let mut listed = NamedObjects::default();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            for row in line["tensors"].as_array().expect("tensors") {
                let kind = match row[0].as_str().expect("a kind") {
                    "parameter" => TensorKind::Parameter,
                    "buffer" => TensorKind::Buffer,
                    "gradient" => TensorKind::Gradient,
                    "optimizer_state" => TensorKind::OptimizerState,
                    other => panic!("{other}"),
                };
                let text = |at: usize| row[at].as_str().expect("a text").to_owned();
                listed.tensors.insert((kind, text(1), row[2].as_u64().expect("an address"), text(3)));
            }
            for row in line["modules"].as_array().expect("modules") {
                let text = |at: usize| row[at].as_str().expect("a text").to_owned();
                listed.modules.insert((row[0].as_u64().expect("an id"), text(1), text(2)));
            }
        }
        listed
    }
}

/// Requires that the recording names exactly the tensors that PyTorch named, at the same addresses.
#[track_caller]
fn assert_same(reader: &Reader, list: &Path) -> NamedObjects {
    let (ours, theirs) = (NamedObjects::of(reader.definitions()), NamedObjects::read(list));
    assert!(!theirs.tensors.is_empty() && !theirs.modules.is_empty(), "the program's list is empty");
    assert_eq!(ours.names(), theirs.names());
    let elsewhere: Vec<_> =
        ours.tensors.difference(&theirs.tensors).filter(|tensor| !is_gathered(tensor, &theirs)).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:#?}");
    let modules: Vec<_> = theirs.modules.difference(&ours.modules).collect();
    assert!(modules.is_empty(), "modules without their names: {modules:#?}");
    assert_found(reader, &ours);
    ours
}

/// Whether this is a full parameter that FSDP temporarily gathered from two ranks. The program's list has this rank's
/// half of it.
fn is_gathered((kind, name, _, shape): &(TensorKind, String, u64, String), theirs: &NamedObjects) -> bool {
    let rows =
        |shape: &str| shape.split_once('[').and_then(|(_, rest)| rest.split([',', ']']).next()?.parse::<u64>().ok());
    let halves = theirs.tensors.iter().filter(|t| t.0 == TensorKind::Parameter && t.1 == *name);
    *kind == TensorKind::Parameter
        && halves.filter_map(|t| rows(&t.3)).any(|half| half > 0 && rows(shape) == Some(2 * half))
}

/// Requires that each name belongs to one allocation of PyTorch's allocator: the one that exists at that time.
#[track_caller]
fn assert_found(reader: &Reader, ours: &NamedObjects) {
    let recording = TraceRecording::open(reader.path()).expect("a readable trace");
    let names = Names::of(&recording);
    assert_eq!(names.unmatched(), 0, "names without a block");
    let events = events(reader);
    let mut found = BTreeSet::new();
    for e in events.iter().filter(|e| e.action == Action::Alloc && e.source == Source::Torch) {
        let Some(named) = names.of_allocation(e.seq) else { continue };
        for name in &named.names {
            assert!(ours.tensors.iter().any(|t| t.1 == **name && t.2 == e.addr), "{name} at {:x}", e.addr);
            found.insert(&**name);
        }
    }
    assert_eq!(found, ours.tensors.iter().map(|t| &*t.1).collect());
    let last = events.last().map_or(0, |e: &Event| e.seq);
    assert!(recording.definitions().tensor_names.iter().all(|name| name.seq <= last));
}

fn case(name: &str) -> (TracedProgram, tempfile::NamedTempFile) {
    let list = tempfile::NamedTempFile::new().expect("a temporary file");
    (TracedProgram::python("names/named.py", &[name]).env("MEMTRACE_TEST_NAMES", list.path()), list)
}

fn check(name: &str) -> (Run, NamedObjects) {
    check_on(name, |traced| traced)
}

#[track_caller]
fn check_on(name: &str, with: impl Fn(TracedProgram) -> TracedProgram) -> (Run, NamedObjects) {
    let (traced, list) = case(name);
    let run = with(traced).run();
    run.assert_ended_well();
    let listed = assert_same(&run.trace(), list.path());
    (run, listed)
}

#[test]
fn a_perceptron_with_adam() {
    use TensorKind::{Gradient, OptimizerState, Parameter};
    let (run, listed) = check("adam");
    assert_eq!([Parameter, Gradient, OptimizerState].map(|kind| listed.count(kind)), [6, 6, 12]);
    let notices = run.trace().definitions().notices.iter().filter(|n| &*n.topic == "torch.names").count();
    assert_eq!(notices, 1);
    // Check the snapshot as PyTorch's reader unpickles it.
    let shown: BTreeMap<String, u64> = vizcheck("metadata.py", [pickle(&run)])
        .as_object()
        .expect("texts")
        .iter()
        .map(|(text, count)| (text.clone(), count.as_u64().expect("a count")))
        .collect();
    for (_, name, _, shape) in &listed.tensors {
        assert!(shown.contains_key(&format!("{name} {shape}")), "{name} {shape}: {shown:#?}");
    }
}

#[test]
fn a_residual_network_with_momentum() {
    let (_, listed) = check("resnet");
    assert!(listed.names().contains(&(TensorKind::Buffer, "layer1.0.scale")), "{:?}", listed.names());
    assert!(listed.names().contains(&(TensorKind::OptimizerState, "SGD.momentum_buffer of layer2.1.bn2.weight")));
}

#[test]
fn shared_memory_has_all_names() {
    let (run, _) = check("tied");
    let recording = TraceRecording::open(run.trace().path()).expect("a readable trace");
    let names = Names::of(&recording);
    let all: Vec<String> =
        events(&run.trace()).iter().filter_map(|e| Some(names.of_allocation(e.seq)?.text())).collect();
    for shared in ["head.weight, wte.weight", "again.weight, block.weight", "first, second"] {
        assert!(all.iter().any(|text| text == shared), "{shared}: {all:#?}");
    }
}

#[test]
fn frozen_layers_have_no_gradients() {
    let (_, listed) = check("frozen");
    assert_eq!(listed.count(TensorKind::Gradient), 2);
}

/// With two models of one class and no variable, the names do not say which model is the first.
#[test]
fn two_models_of_one_class() {
    let (traced, list) = case("two");
    let run = traced.run();
    run.assert_ended_well();
    let text = std::fs::read_to_string(list.path()).expect("the program's own list");
    let swapped = text.replace("#1", "#0").replace("#2", "#1").replace("#0", "#2");
    let (ours, other) = (NamedObjects::of(run.trace().definitions()), tempfile::NamedTempFile::new().expect("a file"));
    std::fs::write(other.path(), swapped).expect("a file");
    let list = if NamedObjects::read(list.path()).tensors.is_superset(&ours.tensors) { list } else { other };
    assert_same(&run.trace(), list.path());
}

#[test]
fn two_models_in_variables() {
    let (_, listed) = check("variables");
    let has = |kind, name| listed.names().contains(&(kind, name));
    assert!(has(TensorKind::Parameter, "generator.0.weight") && has(TensorKind::Parameter, "discriminator.0.weight"));
    assert!(has(TensorKind::OptimizerState, "Adam.exp_avg of generator.0.weight"));
}

#[test]
fn two_models_of_two_classes() {
    let (_, listed) = check("classes");
    assert!(listed.names().contains(&(TensorKind::Gradient, "Discriminator.2.bias.grad")), "{:?}", listed.names());
    assert!(listed.names().contains(&(TensorKind::Parameter, "scale.weight")), "{:?}", listed.names());
}

/// Requires that every parameter, buffer and optimizer state that the program ever lists is named, and no parameter at
/// another address.
#[track_caller]
fn check_listed(name: &str) -> NamedObjects {
    let (traced, list) = case(name);
    let run = traced.run();
    run.assert_ended_well();
    let (ours, theirs) = (NamedObjects::of(run.trace().definitions()), NamedObjects::read(list.path()));
    let elsewhere: Vec<_> = ours.tensors.difference(&theirs.tensors).filter(|t| t.0 == TensorKind::Parameter).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:#?}");
    let lasting = |names: BTreeSet<(TensorKind, &str)>| -> BTreeSet<(TensorKind, String)> {
        let names = names.into_iter().filter(|(kind, _)| *kind != TensorKind::Gradient);
        names.map(|(kind, name)| (kind, name.to_owned())).collect()
    };
    assert_eq!(lasting(ours.names()), lasting(theirs.names()));
    ours
}

#[test]
fn a_model_created_later() {
    let ours = check_listed("second_model");
    let has = |kind, name| ours.names().contains(&(kind, name));
    assert!(has(TensorKind::Parameter, "0.weight") && !has(TensorKind::Parameter, "Sequential.0.weight"));
    assert!(has(TensorKind::Parameter, "Discriminator.0.weight"), "{:?}", ours.names());
    assert!(has(TensorKind::OptimizerState, "Adam.exp_avg of Discriminator.2.bias"), "{:?}", ours.names());
}

#[test]
fn models_that_replace_each_other() {
    let listed = check_listed("folds");
    assert!(listed.names().contains(&(TensorKind::Parameter, "Generator.0.weight")), "{:?}", listed.names());
}

#[test]
fn an_optimizer_created_later() {
    let ours = check_listed("resumed");
    let has = |name| ours.names().contains(&(TensorKind::OptimizerState, name));
    assert!(has("SGD.momentum_buffer of 0.weight") && has("Adam.exp_avg of 0.weight"), "{:?}", ours.names());
}

#[test]
fn a_second_model_loaded_during_inference() {
    let (_, listed) = check("served");
    assert!(listed.names().contains(&(TensorKind::Parameter, "layer1.0.conv1.weight")), "{:?}", listed.names());
}

#[test]
fn a_model_that_is_never_trained() {
    check("inference");
}

#[test]
fn out_of_memory_in_the_first_step() {
    let (_, listed) = check_on("oom", |traced| traced.env("SIMCUDA_MEMORY", "1500M"));
    let made = listed.count(TensorKind::OptimizerState);
    assert!((1..32).contains(&made), "{made} of 32 tensors of the optimizer's state");
    assert_eq!((listed.count(TensorKind::Parameter), listed.count(TensorKind::Gradient)), (16, 16));
}

#[test]
fn tensors_of_a_single_step() {
    let (traced, list) = case("one_step");
    let run = traced.run();
    run.assert_ended_well();
    let (ours, theirs) = (NamedObjects::of(run.trace().definitions()), NamedObjects::read(list.path()));
    assert!(theirs.names().is_subset(&ours.names()), "{:?}", ours.names());
    assert_found(&run.trace(), &ours);
}

#[test]
fn the_program_is_unchanged_and_names_can_be_disabled() {
    // The number of objects depends on string hashes, so the hash seed is fixed.
    let traced = TracedProgram::python("names/named.py", &["untouched"]).env("PYTHONHASHSEED", "0");
    // The first run on a machine compiles modules, and so has other objects.
    traced.run_alone();
    let alone = traced.run_alone();
    let (with, without) = (traced.run(), traced.clone().option("--no-names").run());
    assert!(alone.status.success() && !alone.stdout.is_empty());
    with.assert_ended_well();
    without.assert_ended_well();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&without.output.stdout), text(&alone.stdout));
    // With tensor names the number of all objects may differ: the collector runs an allocation earlier or later, and
    // leaves other garbage.
    let counts = |text: &[u8]| -> Vec<String> {
        let text = String::from_utf8_lossy(text);
        text.lines().filter_map(|line| Some(line.rsplit_once(") ")?.0.rsplit_once(' ')?.0.to_owned())).collect()
    };
    assert_eq!(counts(&with.output.stdout), counts(&alone.stdout));
    let named = |run: &Run| {
        let trace = run.trace();
        let definitions = trace.definitions();
        let names = [definitions.tensor_names.len(), definitions.nn_names.len(), definitions.nn_calls.len()];
        // A scan for names reads the memory in use on the device too.
        let is_reading = |e: &Event| e.action == Action::DeviceUsage;
        (names, trace.events().flatten().flatten().filter(|e| !is_reading(e)).count())
    };
    let (([tensors, modules, calls], all), off) = (named(&with), named(&without));
    assert!(tensors >= 6 + 6 + 12 && modules == 6 && calls >= 6, "{tensors} {modules} {calls}");
    assert_eq!(off, ([0; 3], all), "the same events, no names and no calls of modules");
    let topics =
        |run: &Run| -> Vec<String> { run.trace().definitions().notices.iter().map(|n| n.topic.to_string()).collect() };
    for topic in ["torch.names", "torch.modules", TRAINING_TOPIC] {
        assert!(topics(&with).iter().any(|t| t == topic) && !topics(&without).iter().any(|t| t == topic), "{topic}");
    }
}

#[track_caller]
fn check_ranks(kind: &str, versions: Versions) -> NamedObjects {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let list = folder.path().join("names");
    let traced = TracedProgram::python("names/ranks.py", &[kind])
        .on(versions)
        .env("SIMCUDA_DEVICES", "2")
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONPATH", root().join("tests/programs/names"))
        .env("MEMTRACE_TEST_NAMES", &list);
    let run = traced.run();
    run.assert_ended_well();
    let mut last = NamedObjects::default();
    for entry in run.manifest()["processes"].as_array().expect("processes") {
        let reader = Reader::open(run.path().join(entry["trace"].as_str().expect("a trace"))).expect("a trace");
        let rank = entry["rank"].as_u64().expect("a rank");
        last = assert_same(&reader, &folder.path().join(format!("names.{rank}")));
    }
    last
}

#[test]
fn ranks_of_ddp() {
    assert!(check_ranks("ddp", Versions::DEFAULT).names().contains(&(TensorKind::Parameter, "module.4.bias")));
}

#[test]
fn ranks_of_fsdp() {
    check_fsdp(Versions::DEFAULT);
}

#[track_caller]
fn check_fsdp(versions: Versions) {
    let found = check_ranks("fsdp", versions);
    assert!(found.names().contains(&(TensorKind::OptimizerState, "AdamW.exp_avg_sq of 2.weight")));
}

/// Every other PyTorch and Python release.
mod exhaustive {
    use super::*;

    #[test]
    fn compiled_models() {
        let (_, listed) = check("compiled");
        assert!(listed.names().contains(&(TensorKind::Gradient, "_orig_mod.2.weight.grad")), "{:?}", listed.names());
    }

    memtrace_tests::for_each_version! { mod versions: check_versions }

    #[track_caller]
    fn check_versions(versions: Versions) {
        let on = |traced: TracedProgram| traced.on(versions);
        for name in ["adam", "resnet", "tied"] {
            check_on(name, on);
        }
        check_on("oom", |traced| on(traced).env("SIMCUDA_MEMORY", "1500M"));
    }

    /// In this release not every tensor of the model and the optimizer is a `DTensor`.
    mod fsdp {
        use super::*;

        #[test]
        fn pytorch_2_11_0_on_python_3_11() {
            check_fsdp(Versions::ON_GPUS);
        }
    }

    #[test]
    fn names_are_off_with_a_notice_in_an_unverified_release() {
        let run = TracedProgram::python("names/named.py", &["adam"]).on(Versions::REPORTER_ONLY).run();
        run.assert_ended_well();
        let trace = run.trace();
        assert!(trace.definitions().tensor_names.is_empty());
        let notice = trace.definitions().notices.iter().find(|n| &*n.topic == "torch.names").expect("a notice");
        assert_eq!(notice.status, NoticeStatus::Off);
        assert!(notice.text.contains("does not export"), "{}", notice.text);
    }
}
