//! torch.compile: every event against PyTorch's own recorder, with the frames of compiled code.
//!
//! These are resumed functions, generated files, and the CPython frames that dynamo's frame evaluation makes.

use memtrace_tests::oracle::{Entry, Oracle, compare};
use memtrace_tests::snapshots::{at_least, json, pickle, vizcheck};
use memtrace_tests::traced_program::TracedProgram;
use serde_json::Value;

fn compiled(backend: &str) -> Oracle {
    // The compilers' caches in the home folder must not affect the test.
    let cache = tempfile::tempdir().expect("a temporary folder");
    let traced = TracedProgram::python("compile/train.py", &[backend]).env("TORCHINDUCTOR_CACHE_DIR", cache.path());
    compare(traced).1
}

/// Requires an event under a frame whose name begins with `name`, in a file whose path contains `file`.
#[track_caller]
fn assert_frame(oracle: &Oracle, name: &str, file: &str) {
    let entries = oracle.entries();
    let has = |e: &Entry| e.frames.iter().any(|(n, f, _)| n.starts_with(name) && f.contains(file));
    assert!(entries.values().flatten().any(has), "no event under {name} of {file}");
}

#[test]
fn graphs_with_the_eager_backend() {
    let oracle = compiled("eager");
    assert_frame(&oracle, "torch_dynamo_resume_in_forward_at_", "train.py");
    assert_frame(&oracle, "torch_dynamo_resume_in_consume_at_", "train.py");
    // The graph's own code is in no file.
    assert_frame(&oracle, "forward", "<eval_with_key>");
}

/// The names of all stacks in a part of a summary.
fn places_in(summary: &Value, places: &mut Vec<String>) {
    match summary {
        Value::Object(fields) => {
            places.extend(fields.get("location").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| places_in(value, places));
        }
        Value::Array(values) => values.iter().for_each(|value| places_in(value, places)),
        _ => {}
    }
}

mod exhaustive {
    use super::*;

    #[test]
    fn graphs_with_the_aot_eager_backend() {
        let oracle = compiled("aot_eager");
        assert_frame(&oracle, "torch_dynamo_resume_in_forward_at_", "train.py");
        assert_frame(&oracle, "backward", "torch/_functorch");
    }

    #[test]
    fn lines_of_generated_files_are_followed_by_their_source_lines() {
        let (cache, origins) =
            (tempfile::tempdir().expect("a folder"), tempfile::NamedTempFile::new().expect("a file"));
        let run = TracedProgram::python("compile/inductor_lines.py", &[&origins.path().to_string_lossy()])
            .env("SIMCUDA_DEVICES", "0")
            .env("TORCHINDUCTOR_CACHE_DIR", cache.path())
            // Each process that only compiles takes time to start.
            .env("TORCHINDUCTOR_COMPILE_THREADS", "1")
            .option("--cpu")
            .option("always")
            .run();
        run.assert_ended_well();
        // Inductor's own map of lines to origins is the oracle; the snapshot is compared with it.
        let found = vizcheck("inductor_lines.py", [pickle(&run).as_os_str(), origins.path().as_os_str()]);
        at_least(&found, &[("something", 40), ("several", 4)]);
        let mut places = Vec::new();
        places_in(&json(&run.path().join("summary.json"))["processes"], &mut places);
        assert!(places.iter().any(|place| place.contains("inductor_lines.py:24 forward")), "{places:?}");
        let generated = places.iter().find(|place| place.contains(".py") && place.ends_with(" call"));
        assert_eq!(generated, None, "the program's own line, not the generated one");
    }
}
