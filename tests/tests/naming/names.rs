//! The names that memtrace gives tensors and modules, against PyTorch's: `named_parameters()`, `named_buffers()`,
//! `.grad`, `optimizer.state` and `named_modules()`, which the program itself calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use memtrace_analysis::load::TraceRecording;
use memtrace_analysis::model::{Names, Recording};
use memtrace_tests::snapshots::{pickle, vizcheck};
use memtrace_tests::victim::{Run, Victim, events, root};
use memtrace_trace::definition::{TensorKind, Verdict};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Definitions, Reader};
use serde_json::Value;

/// Kind, name, address, and data type with shape.
type Tensor = (TensorKind, String, u64, String);
/// Address of the object, class, path.
type Module = (u64, String, String);

#[derive(Default, Debug)]
struct Told {
    tensors: BTreeSet<Tensor>,
    modules: BTreeSet<Module>,
}

impl Told {
    /// Kinds and names, without addresses.
    fn names(&self) -> BTreeSet<(TensorKind, &str)> {
        self.tensors.iter().map(|(kind, name, ..)| (*kind, &**name)).collect()
    }

    fn count(&self, kind: TensorKind) -> usize {
        self.names().iter().filter(|(k, _)| *k == kind).count()
    }

    fn of(definitions: &Definitions) -> Told {
        let tensor =
            |n: &memtrace_trace::file::TensorName| (n.kind, n.name.to_string(), n.address, n.shape.to_string());
        let module = |n: &memtrace_trace::file::NnName| (n.object, n.class.to_string(), n.name.to_string());
        Told {
            tensors: definitions.tensor_names.iter().map(tensor).collect(),
            modules: definitions.nn_names.iter().map(module).collect(),
        }
    }

    /// Parses the list that the program wrote.
    fn read(path: &Path) -> Told {
        let text = std::fs::read_to_string(path).expect("the program's own list");
        let mut told = Told::default();
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
                told.tensors.insert((kind, text(1), row[2].as_u64().expect("an address"), text(3)));
            }
            for row in line["modules"].as_array().expect("modules") {
                let text = |at: usize| row[at].as_str().expect("a text").to_owned();
                told.modules.insert((row[0].as_u64().expect("an id"), text(1), text(2)));
            }
        }
        told
    }
}

/// Requires that the recording names exactly the tensors that PyTorch named, at the same addresses.
#[track_caller]
fn assert_same(reader: &Reader, list: &Path) -> Told {
    let (ours, theirs) = (Told::of(reader.definitions()), Told::read(list));
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
fn is_gathered((kind, name, _, shape): &(TensorKind, String, u64, String), theirs: &Told) -> bool {
    let rows =
        |shape: &str| shape.split_once('[').and_then(|(_, rest)| rest.split([',', ']']).next()?.parse::<u64>().ok());
    let halves = theirs.tensors.iter().filter(|t| t.0 == TensorKind::Parameter && t.1 == *name);
    *kind == TensorKind::Parameter
        && halves.filter_map(|t| rows(&t.3)).any(|half| half > 0 && rows(shape) == Some(2 * half))
}

/// Requires that each name belongs to one allocation of PyTorch's allocator: the one that exists at that time.
#[track_caller]
fn assert_found(reader: &Reader, ours: &Told) {
    let recording = TraceRecording::open(reader.path()).expect("a readable trace");
    let names = Names::of(&recording);
    assert_eq!(names.unmatched(), 0, "names without a block");
    let events = events(reader);
    let mut found = BTreeSet::new();
    for e in events.iter().filter(|e| e.action == Action::Alloc && e.source == Source::Torch) {
        let Some(named) = names.of_alloc(e.seq) else { continue };
        for name in &named.names {
            assert!(ours.tensors.iter().any(|t| t.1 == **name && t.2 == e.addr), "{name} at {:x}", e.addr);
            found.insert(&**name);
        }
    }
    assert_eq!(found, ours.tensors.iter().map(|t| &*t.1).collect());
    let last = events.last().map_or(0, |e: &Event| e.seq);
    assert!(recording.definitions().tensor_names.iter().all(|name| name.seq <= last));
}

fn case(name: &str) -> (Victim, tempfile::NamedTempFile) {
    let list = tempfile::NamedTempFile::new().expect("a temporary file");
    (Victim::python("names/named.py", &[name]).env("MEMTRACE_TEST_NAMES", list.path()), list)
}

fn check(name: &str) -> (Run, Told) {
    check_on(name, |victim| victim)
}

#[track_caller]
fn check_on(name: &str, with: impl Fn(Victim) -> Victim) -> (Run, Told) {
    let (victim, list) = case(name);
    let run = with(victim).run();
    run.assert_ended_well();
    let told = assert_same(&run.trace(), list.path());
    (run, told)
}

#[test]
fn a_perceptron_with_adam() {
    use TensorKind::{Gradient, OptimizerState, Parameter};
    let (run, told) = check("adam");
    assert_eq!([Parameter, Gradient, OptimizerState].map(|kind| told.count(kind)), [6, 6, 12]);
    let verdicts = run.trace().definitions().notices.iter().filter(|n| &*n.topic == "torch.names").count();
    assert_eq!(verdicts, 1);
    // Check the snapshot as PyTorch's reader unpickles it.
    let shown: BTreeMap<String, u64> = vizcheck("metadata.py", [pickle(&run)])
        .as_object()
        .expect("texts")
        .iter()
        .map(|(text, count)| (text.clone(), count.as_u64().expect("a count")))
        .collect();
    for (_, name, _, shape) in &told.tensors {
        assert!(shown.contains_key(&format!("{name} {shape}")), "{name} {shape}: {shown:#?}");
    }
}

#[test]
fn a_residual_network_with_momentum() {
    let (_, told) = check("resnet");
    assert!(told.names().contains(&(TensorKind::Buffer, "layer1.0.scale")), "{:?}", told.names());
    assert!(told.names().contains(&(TensorKind::OptimizerState, "SGD.momentum_buffer of layer2.1.bn2.weight")));
}

#[test]
fn shared_memory_has_all_its_names() {
    let (run, _) = check("tied");
    let recording = TraceRecording::open(run.trace().path()).expect("a readable trace");
    let names = Names::of(&recording);
    let all: Vec<String> = events(&run.trace()).iter().filter_map(|e| Some(names.of_alloc(e.seq)?.text())).collect();
    for shared in ["head.weight, wte.weight", "again.weight, block.weight", "first, second"] {
        assert!(all.iter().any(|text| text == shared), "{shared}: {all:#?}");
    }
}

#[test]
fn frozen_layers_have_no_gradients() {
    let (_, told) = check("frozen");
    assert_eq!(told.count(TensorKind::Gradient), 2);
}

#[test]
fn compiled_models() {
    let (_, told) = check("compiled");
    assert!(told.names().contains(&(TensorKind::Gradient, "_orig_mod.2.weight.grad")), "{:?}", told.names());
}

/// With two models of one class and no variable, the names do not say which model is the first.
#[test]
fn two_models_of_one_class() {
    let (victim, list) = case("two");
    let run = victim.run();
    run.assert_ended_well();
    let text = std::fs::read_to_string(list.path()).expect("the program's own list");
    let swapped = text.replace("#1", "#0").replace("#2", "#1").replace("#0", "#2");
    let (ours, other) = (Told::of(run.trace().definitions()), tempfile::NamedTempFile::new().expect("a file"));
    std::fs::write(other.path(), swapped).expect("a file");
    let list = if Told::read(list.path()).tensors.is_superset(&ours.tensors) { list } else { other };
    assert_same(&run.trace(), list.path());
}

#[test]
fn two_models_in_variables() {
    let (_, told) = check("variables");
    let has = |kind, name| told.names().contains(&(kind, name));
    assert!(has(TensorKind::Parameter, "generator.0.weight") && has(TensorKind::Parameter, "discriminator.0.weight"));
    assert!(has(TensorKind::OptimizerState, "Adam.exp_avg of generator.0.weight"));
}

#[test]
fn two_models_of_two_classes() {
    let (_, told) = check("classes");
    assert!(told.names().contains(&(TensorKind::Gradient, "Discriminator.2.bias.grad")), "{:?}", told.names());
    assert!(told.names().contains(&(TensorKind::Parameter, "scale.weight")), "{:?}", told.names());
}

/// Requires that every parameter, buffer and optimizer state that the program ever lists is named, and no parameter at
/// another address.
#[track_caller]
fn check_listed(name: &str) -> Told {
    let (victim, list) = case(name);
    let run = victim.run();
    run.assert_ended_well();
    let (ours, theirs) = (Told::of(run.trace().definitions()), Told::read(list.path()));
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
fn a_model_that_comes_later() {
    let ours = check_listed("later");
    let has = |kind, name| ours.names().contains(&(kind, name));
    assert!(has(TensorKind::Parameter, "0.weight") && !has(TensorKind::Parameter, "Sequential.0.weight"));
    assert!(has(TensorKind::Parameter, "Discriminator.0.weight"), "{:?}", ours.names());
    assert!(has(TensorKind::OptimizerState, "Adam.exp_avg of Discriminator.2.bias"), "{:?}", ours.names());
}

#[test]
fn models_that_replace_each_other() {
    let told = check_listed("folds");
    assert!(told.names().contains(&(TensorKind::Parameter, "Generator.0.weight")), "{:?}", told.names());
}

#[test]
fn an_optimizer_that_comes_later() {
    let ours = check_listed("resumed");
    let has = |name| ours.names().contains(&(TensorKind::OptimizerState, name));
    assert!(has("SGD.momentum_buffer of 0.weight") && has("Adam.exp_avg of 0.weight"), "{:?}", ours.names());
}

#[test]
fn a_model_that_is_served_later() {
    let (_, told) = check("served");
    assert!(told.names().contains(&(TensorKind::Parameter, "layer1.0.conv1.weight")), "{:?}", told.names());
}

#[test]
fn a_model_that_is_never_trained() {
    check("inference");
}

#[test]
fn out_of_memory_in_the_first_step() {
    let (_, told) = check_on("oom", |victim| victim.env("SIMCUDA_MEMORY", "1500M"));
    let made = told.count(TensorKind::OptimizerState);
    assert!((1..32).contains(&made), "{made} of 32 tensors of the optimizer's state");
    assert_eq!((told.count(TensorKind::Parameter), told.count(TensorKind::Gradient)), (16, 16));
}

#[test]
fn what_the_only_step_made() {
    let (victim, list) = case("one_step");
    let run = victim.run();
    run.assert_ended_well();
    let (ours, theirs) = (Told::of(run.trace().definitions()), Told::read(list.path()));
    assert!(theirs.names().is_subset(&ours.names()), "{:?}", ours.names());
    assert_found(&run.trace(), &ours);
}

#[test]
fn nothing_is_changed_and_names_can_be_switched_off() {
    // The number of objects depends on string hashes, so the hash seed is fixed.
    let victim = Victim::python("names/named.py", &["untouched"]).env("PYTHONHASHSEED", "0");
    let alone = victim.run_alone();
    let (with, without) = (victim.run(), victim.clone().option("--no-names").run());
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
        (names, trace.events().flatten().flatten().count())
    };
    let (([tensors, modules, calls], all), off) = (named(&with), named(&without));
    assert!(tensors >= 6 + 6 + 12 && modules == 6 && calls >= 6, "{tensors} {modules} {calls}");
    assert_eq!(off, ([0; 3], all), "the same events, no names and no calls of modules");
    let topics =
        |run: &Run| -> Vec<String> { run.trace().definitions().notices.iter().map(|n| n.topic.to_string()).collect() };
    for topic in ["torch.names", "torch.modules"] {
        assert!(topics(&with).iter().any(|t| t == topic) && !topics(&without).iter().any(|t| t == topic), "{topic}");
    }
}

#[track_caller]
fn check_ranks(kind: &str) -> Told {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let list = folder.path().join("names");
    let victim = Victim::python("names/ranks.py", &[kind])
        .env("SIMCUDA_DEVICES", "2")
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONPATH", root().join("tests/programs/names"))
        .env("MEMTRACE_TEST_NAMES", &list);
    let run = victim.run();
    run.assert_ended_well();
    let mut last = Told::default();
    for entry in run.manifest()["processes"].as_array().expect("processes") {
        let reader = Reader::open(run.path().join(entry["trace"].as_str().expect("a trace"))).expect("a trace");
        let rank = entry["rank"].as_u64().expect("a rank");
        last = assert_same(&reader, &folder.path().join(format!("names.{rank}")));
    }
    last
}

#[test]
fn ranks_of_ddp() {
    assert!(check_ranks("ddp").names().contains(&(TensorKind::Parameter, "module.4.bias")));
}

#[test]
fn ranks_of_fsdp() {
    assert!(check_ranks("fsdp").names().contains(&(TensorKind::OptimizerState, "AdamW.exp_avg_sq of 2.weight")));
}

/// Every other PyTorch and Python release.
mod exhaustive {
    use super::*;

    fn on(torch: &'static str, python: &'static str) -> impl Fn(Victim) -> Victim {
        move |victim| victim.env("SIM_TORCH", torch).env("SIM_PYTHON", python)
    }

    #[track_caller]
    fn check_release(torch: &'static str, python: &'static str) {
        for name in ["adam", "resnet", "tied"] {
            check_on(name, on(torch, python));
        }
        check_on("oom", |victim| on(torch, python)(victim).env("SIMCUDA_MEMORY", "1500M"));
    }

    #[test]
    fn the_oldest_release() {
        check_release("2.4.1", "3.11");
    }

    #[test]
    fn a_release_in_between() {
        check_release("2.7.1", "3.11");
    }

    #[test]
    fn the_newest_release() {
        check_release("2.15.0", "3.11");
    }

    #[test]
    fn python_3_8() {
        check_release("2.4.1", "3.8");
    }

    #[test]
    fn python_3_10() {
        check_release("2.4.1", "3.10");
    }

    #[test]
    fn python_3_12() {
        check_release("2.11.0", "3.12");
    }

    #[test]
    fn python_3_13() {
        check_release("2.11.0", "3.13");
    }

    #[test]
    fn a_release_that_cannot_be_verified_has_none_and_says_so() {
        let run = Victim::python("names/named.py", &["adam"]).env("SIM_TORCH", "2.1.2").run();
        run.assert_ended_well();
        let trace = run.trace();
        assert!(trace.definitions().tensor_names.is_empty());
        let said = trace.definitions().notices.iter().find(|n| &*n.topic == "torch.names").expect("a notice");
        assert_eq!(said.verdict, Verdict::Off);
        assert!(said.text.contains("does not export"), "{}", said.text);
    }
}
