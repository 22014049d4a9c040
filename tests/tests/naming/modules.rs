//! The `nn.Module` that was called at each allocation, and the module whose call made the autograd node that runs.
//!
//! The oracle is another run without memtrace, with PyTorch's own global forward hooks and a walk of its graph. The two
//! runs are compared allocation by allocation.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use memtrace_analysis::export::{Window, blocks_csv};
use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_tests::versions::Versions;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::Action;
use memtrace_trace::file::{Definitions, Reader};
use memtrace_trace::ids::ContextId;
use serde_json::Value;

/// The modules that are being called, or whose call made a node: path and class, outermost call first.
type Calls = Vec<(String, String)>;

/// One allocation as the program itself observed it.
#[derive(Debug)]
struct Expected {
    size: u64,
    node: Option<String>,
    calls: Calls,
}

/// Runs a case without memtrace and reads the list that it wrote.
#[track_caller]
fn expected(traced: &TracedProgram) -> Vec<Expected> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let output = traced.clone().env("MEMTRACE_TEST_TRAIL", file.path()).run_alone();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(file.path()).expect("a trail");
    let trail: Value = serde_json::from_str(&text).expect("a trail in JSON");
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let marks = list(&trail["trail"]);
    let mut marks = marks.iter().peekable();
    let mut now: &Value = &Value::Null;
    let sizes = list(&trail["sizes"]);
    let expected = sizes.iter().enumerate().map(|(index, size)| {
        while let Some(mark) = marks.next_if(|mark| mark[0].as_u64().is_some_and(|count| count <= index as u64)) {
            now = mark;
        }
        let calls = list(&now[2]).iter().map(|call| (text(&call[0]).unwrap(), text(&call[1]).unwrap())).collect();
        Expected { size: size.as_u64().unwrap(), node: text(&now[1]), calls }
    });
    expected.collect()
}

/// One recorded allocation.
#[derive(Debug)]
struct Recorded {
    size: u64,
    node: Option<String>,
    /// Context ids and class names, outermost call first.
    calls: Vec<(ContextId, String)>,
}

fn calls_of(definitions: &Definitions, mut context: ContextId) -> Vec<(ContextId, String)> {
    let mut calls = Vec::new();
    while !context.is_none() {
        let call = definitions.nn_calls.get(&context).expect("what is no node is the call of a module");
        calls.push((context, call.class.to_string()));
        context = call.caller;
    }
    calls.reverse();
    calls
}

fn recorded(trace: &Reader) -> Vec<Recorded> {
    let definitions = trace.definitions();
    let allocs =
        events(trace).into_iter().filter(|e| e.source.is_torch() && e.action == Action::Alloc && e.device == 0);
    let recorded = allocs.map(|e| {
        let node = definitions.context(e.context);
        let call = node.map_or(e.context, |node| node.module);
        Recorded { size: e.size, node: node.map(|n| n.node.to_string()), calls: calls_of(definitions, call) }
    });
    recorded.collect()
}

/// The numbers of items that agreed.
#[derive(Debug, Default)]
struct Found {
    in_forward: usize,
    in_backward: usize,
    deepest: usize,
    modules: usize,
}

/// Compares a case allocation by allocation. For modules of the program's models, the calls must correspond one to one:
/// the same path is the same call, and the reverse.
#[track_caller]
fn compare(traced: &TracedProgram) -> Found {
    let expected = expected(traced);
    let run = traced.run();
    run.assert_ended_well();
    let trace = run.trace();
    let recorded = recorded(&trace);
    assert_eq!((trace.counter(Counter::NnCallsMerged), trace.counter(Counter::ForwardStacksLost)), (0, 0));
    let notice = trace.definitions().notices.iter().find(|n| &*n.topic == "torch.modules");
    assert_eq!(notice.map(|n| n.status), Some(NoticeStatus::Works), "{notice:?}");

    let sizes = |sizes: &mut dyn Iterator<Item = u64>| sizes.collect::<Vec<_>>();
    assert_eq!(
        sizes(&mut recorded.iter().map(|r| r.size)),
        sizes(&mut expected.iter().map(|t| t.size)),
        "another program"
    );
    let mut found = Found::default();
    let (mut paths, mut ids) = (HashMap::new(), BTreeMap::<Vec<String>, BTreeSet<ContextId>>::new());
    for (index, (ours, theirs)) in recorded.iter().zip(&expected).enumerate() {
        let classes: Vec<&str> = ours.calls.iter().map(|(_, class)| &**class).collect();
        let expected: Vec<&str> = theirs.calls.iter().map(|(_, class)| &**class).collect();
        assert_eq!((&ours.node, classes), (&theirs.node, expected), "allocation {index}: {ours:?} {theirs:?}");
        for depth in 1..=ours.calls.len() {
            let path: Vec<String> = theirs.calls.iter().take(depth).map(|(path, _)| path.clone()).collect();
            let id = ours.calls[depth - 1].0;
            if path.iter().all(|name| name.starts_with("model")) {
                ids.entry(path.clone()).or_default().insert(id);
            }
            let known = paths.entry(id).or_insert_with(|| path.clone());
            assert_eq!(*known, path, "allocation {index}: one call, two modules");
        }
        let inside = usize::from(!theirs.calls.is_empty());
        found.in_backward += if theirs.node.is_some() { inside } else { 0 };
        found.in_forward += if theirs.node.is_none() { inside } else { 0 };
        found.deepest = found.deepest.max(theirs.calls.len());
    }
    let twice: Vec<_> = ids.iter().filter(|(_, ids)| ids.len() > 1).collect();
    assert!(twice.is_empty(), "one module, two calls: {twice:?}");
    found.modules = paths.len();
    found
}

fn case(name: &str) -> TracedProgram {
    TracedProgram::python("modules/cases.py", &[name])
}

/// Requires that enough was compared: allocations in module calls, allocations in their backward, the nesting depth,
/// modules.
#[track_caller]
fn at_least(found: &Found, forward: usize, backward: usize, deepest: usize, modules: usize) {
    let enough = found.in_forward >= forward
        && found.in_backward >= backward
        && found.deepest >= deepest
        && found.modules >= modules;
    assert!(enough, "{found:?}");
    println!("{found:?}");
}

#[test]
fn a_transformer_calls_its_blocks_from_one_line() {
    at_least(&compare(&case("transformer")), 200, 200, 4, 40);
}

#[test]
fn modules_with_unusual_calls() {
    at_least(&compare(&case("odd")), 60, 40, 3, 15);
}

#[test]
fn modules_with_reused_addresses() {
    at_least(&compare(&case("classes")), 400, 300, 1, 10);
}

#[test]
fn a_checkpointed_block() {
    at_least(&compare(&case("saved_checkpoint")), 100, 200, 3, 30);
}

/// The fields of a CSV line.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            letter => fields.last_mut().unwrap().push(letter),
        }
    }
    fields
}

/// Each module's remaining forward memory and parameters equal, to the byte, the counts of PyTorch's MemTracker in the
/// same run.
#[test]
fn bytes_of_modules_match_mem_tracker() {
    let run = TracedProgram::python("modules/tracked.py", &[]).run();
    run.assert_ended_well();
    let opened = memtrace_analysis::open_run(run.path()).unwrap();
    let mut table = Vec::new();
    blocks_csv(&opened.processes()[0], &Window::WHOLE, None, &mut table, &mut |_| {}).unwrap();
    let text = String::from_utf8(table).unwrap();
    let mut lines = text.lines().map(fields);
    let columns = lines.next().unwrap();
    let blocks: Vec<HashMap<&str, String>> =
        lines.map(|line| columns.iter().map(String::as_str).zip(line).collect()).collect();
    let number = |block: &HashMap<&str, String>, column: &str| block[column].parse::<u64>().ok();
    let mut modules = BTreeSet::new();
    for line in String::from_utf8_lossy(&run.output.stdout).lines() {
        let expected: Value = serde_json::from_str(line).unwrap();
        let figure = |name: &str| expected[name].as_u64().unwrap();
        let module = expected["path"].as_str().unwrap();
        let inside = |path: &str| {
            module.is_empty() || path.strip_prefix(module).is_some_and(|p| p.is_empty() || p.starts_with('.'))
        };
        let (begin, end) = (figure("begin_ns"), figure("end_ns"));
        // cuBLAS's workspaces are not tensors: MemTracker does not count them.
        let kept = blocks.iter().filter(|block| {
            let (since, until) = (number(block, "alloc_ns").unwrap(), number(block, "free_ns"));
            inside(&block["module"])
                && (begin..end).contains(&since)
                && until.is_none_or(|until| until > end)
                && block["category"] != "workspace"
        });
        let parameters = blocks.iter().filter(|block| {
            block["category"] == "parameter" && inside(block["name"].rsplit_once('.').map_or("", |(module, _)| module))
        });
        let size = |block: &HashMap<&str, String>| number(block, "size").unwrap();
        assert_eq!(kept.map(size).sum::<u64>(), figure("kept"), "{expected}");
        assert_eq!(parameters.map(size).sum::<u64>(), figure("parameters"), "{expected}");
        modules.insert(module.to_owned());
    }
    assert_eq!(modules.len(), 30, "{modules:?}");
}

mod exhaustive {
    use super::*;

    /// Runs the cases on another release of PyTorch or Python.
    #[track_caller]
    fn on(versions: Versions) {
        for (name, forward, backward) in [("transformer", 200, 200), ("odd", 60, 40), ("saved_checkpoint", 100, 200)] {
            let traced = case(name).on(versions);
            at_least(&compare(&traced), forward, backward, 3, 15);
        }
    }

    memtrace_tests::for_each_version! { mod versions: on }

    #[test]
    fn convolutions() {
        at_least(&compare(&case("convolutions")), 30, 30, 3, 10);
    }

    #[test]
    fn a_module_that_calls_itself() {
        at_least(&compare(&case("recurrent")), 30, 30, 5, 8);
    }

    #[test]
    fn evaluation_without_gradients() {
        at_least(&compare(&case("evaluation")), 80, 0, 4, 20);
    }
}
