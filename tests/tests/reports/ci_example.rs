//! Runs the worked example of docs/how-to/ci.md, exactly as it is on the page, with pytest.

use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{memtrace, packages, root};

/// pytest and the packages that it needs beyond the test environment.
const PACKAGES: [&str; 4] = ["pytest==8.3.5", "iniconfig==2.1.0", "packaging==25.0", "pluggy==1.6.0"];

/// Writes the page's Python files into a folder. Each code block names its file in its first line.
fn unpack(folder: &Path) -> Vec<String> {
    let page = std::fs::read_to_string(root().join("docs/how-to/ci.md")).expect("docs/how-to/ci.md");
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
