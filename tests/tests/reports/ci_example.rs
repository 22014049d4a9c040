//! Runs the worked examples of docs/how-to/ci.md exactly as they are on the page: the fixture with pytest, and the
//! commands of the workflow without a GPU.

use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{memtrace, packages, root};

/// pytest and the packages that it needs beyond the test environment.
const PACKAGES: [&str; 4] = ["pytest==8.3.5", "iniconfig==2.1.0", "packaging==25.0", "pluggy==1.6.0"];

fn page() -> String {
    std::fs::read_to_string(root().join("docs/how-to/ci.md")).expect("docs/how-to/ci.md")
}

/// Writes the page's Python files into a folder. Each code block names its file in its first line.
fn unpack(folder: &Path) -> Vec<String> {
    let page = page();
    let mut names = Vec::new();
    for block in page.split("```python\n# ").skip(1) {
        let (name, rest) = block.split_once('\n').expect("a name");
        let (code, _) = rest.split_once("\n```").expect("an end");
        std::fs::write(folder.join(name), format!("{code}\n")).unwrap();
        names.push(name.to_owned());
    }
    names
}

fn pytest(folder: &Path, packages: &str) -> Output {
    let bin = memtrace();
    let path = format!("{}:{}", bin.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    Command::new(root().join("scripts/sim"))
        .args(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .env("PYTHONPATH", packages)
        .env("PATH", path)
        .current_dir(folder)
        .output()
        .expect("pytest starts")
}

#[test]
fn the_fixture_passes_and_fails_as_documented() {
    let packages = packages(&PACKAGES);
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(unpack(folder.path()), ["conftest.py", "test_memory.py", "train.py"]);
    let output = pytest(folder.path(), &packages);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // The same test with a limit that the program exceeds.
    let test = folder.path().join("test_memory.py");
    let stricter = std::fs::read_to_string(&test).unwrap().replace("128MiB", "4MiB");
    std::fs::write(&test, stricter).unwrap();
    let output = pytest(folder.path(), &packages);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("memtrace check: FAIL  peak ") && text.contains("> 4.00 MiB (GPU 0, step "), "{text}");
}

/// The commands of memtrace in the workflow of the page.
fn workflow() -> Vec<String> {
    let page = page();
    let (_, workflow) = page.split_once("```yaml\n# .github/workflows/gpu-memory.yml\n").expect("the workflow");
    let (workflow, _) = workflow.split_once("\n```").expect("an end");
    workflow.lines().filter_map(|line| line.trim().strip_prefix("- run: memtrace ").map(str::to_owned)).collect()
}

/// Runs a command of memtrace, as words between spaces, with the Python of the test environment.
fn step(folder: &Path, words: &str) -> Output {
    let words: Vec<&str> = words.split(' ').collect();
    let mut command = Command::new(root().join("scripts/sim"));
    command.arg(memtrace()).args(words).current_dir(folder).output().expect("memtrace starts")
}

#[test]
fn the_workflow_without_a_gpu_fails_a_change_that_needs_more_memory() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    unpack(folder);
    let [dry_run, check] = &workflow()[..] else { panic!("two commands of memtrace: {:?}", workflow()) };
    let run = |expected: i32| {
        std::fs::remove_dir_all(folder.join("memtrace-run")).ok();
        let output = step(folder, dry_run);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // The first time there is no baseline yet.
        if !folder.join("ci").exists() {
            std::fs::create_dir(folder.join("ci")).unwrap();
            std::fs::copy(folder.join("memtrace-run/summary.json"), folder.join("ci/memory.json")).unwrap();
        }
        let output = step(folder, check);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(expected), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        text
    };
    run(0);
    // The same program again, and then with a larger batch.
    run(0);
    let program = folder.join("train.py");
    let larger = std::fs::read_to_string(&program).unwrap().replace("torch.empty(256,", "torch.empty(512,");
    std::fs::write(&program, larger).unwrap();
    let text = run(1);
    assert!(text.contains("memtrace check: FAIL  peak ") && text.contains("::error file=train.py"), "{text}");
}
