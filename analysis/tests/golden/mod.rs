//! Golden files beside the tests. `UPDATE_GOLDEN=1` rewrites them.

use std::path::Path;

/// Fails the test unless `text` equals the content of the file.
#[track_caller]
pub(crate) fn assert_matches(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == known, "{}: run with UPDATE_GOLDEN=1 and look at what changed; now:\n{text}", path.display());
}
