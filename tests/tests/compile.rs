//! torch.compile: every event against PyTorch's own recorder, with the frames of compiled code: resumed functions, generated files, and
//! CPython's frames as dynamo's own frame evaluation makes them.

use memtrace_tests::oracle::{Entry, Oracle, compare};
use memtrace_tests::victim::Victim;

fn compiled(backend: &str) -> Oracle {
    // The compilers' caches are the machine's own business.
    let cache = tempfile::tempdir().expect("a temporary folder");
    let victim = Victim::python("compile/train.py", &[backend]).env("TORCHINDUCTOR_CACHE_DIR", cache.path());
    compare(victim).1
}

/// Whether some event happened under a frame of this name (or of a name that begins so) in a file that ends so.
#[track_caller]
fn assert_frame(oracle: &Oracle, name: &str, file: &str) {
    let entries = oracle.entries();
    let has = |e: &Entry| e.frames.iter().any(|(n, f, _)| n.starts_with(name) && f.contains(file));
    assert!(entries.values().flatten().any(has), "no event under {name} of {file}");
}

#[test]
fn graphs_run_eagerly() {
    let oracle = compiled("eager");
    assert_frame(&oracle, "torch_dynamo_resume_in_forward_at_", "train.py");
    assert_frame(&oracle, "torch_dynamo_resume_in_consume_at_", "train.py");
    // The graph's own code, which is in no file.
    assert_frame(&oracle, "forward", "<eval_with_key>");
}

#[test]
fn graphs_by_ahead_of_time_autograd() {
    let oracle = compiled("aot_eager");
    assert_frame(&oracle, "torch_dynamo_resume_in_forward_at_", "train.py");
    assert_frame(&oracle, "backward", "torch/_functorch");
}
