//! At the end of a run, the names of its native code are stored in the run folder. So a report is the same without the
//! libraries.

use std::path::Path;
use std::process::Command;

use crate::launcher_support::*;
use serde_json::Value;

fn report(run: &Path) -> String {
    let output = output(Command::new(memtrace()).arg("report").arg(run));
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn native_symbols_are_stored_in_the_run_folder() {
    let folder = tempfile::tempdir().unwrap();
    let library = crate::native_objects::compile(folder.path(), "lib.c", crate::native_objects::C, &[]);
    let (range, _) = crate::native_objects::symbols(&library).into_iter().find(|(_, name)| name == "outer").unwrap();
    let place = format!("{}:{}:{:x}", library.display(), crate::native_objects::id_of(&library), range.end - 1);
    let run = folder.path().join("run");
    let output = output(recording(&run).arg(PRODUCER).arg(format!("native={place}")).args(["events=1001", "write"]));
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));

    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    let object = &summary["native_objects"][0];
    assert_eq!(
        (&object["addresses"], &object["addresses_with_line"]),
        (&Value::from(1), &Value::from(1)),
        "{summary:#}"
    );
    let here = report(&run);
    assert!(here.contains("outer [native]") || here.contains("inner [native]"), "{here}");

    std::fs::remove_file(&library).unwrap();
    assert_eq!(report(&run), here, "a machine without the library");
    std::fs::remove_file(run.join("symbols.json")).unwrap();
    let unnamed = report(&run);
    assert!(unnamed.contains(&format!("lib.c.so+{:#x} [native]", range.end - 1)), "{unnamed}");
    assert!(unnamed.contains("Missing symbols") && unnamed.contains("does not exist"), "{unnamed}");
}
