//! The browser of the user: `$BROWSER`, or what `xdg-open` selects.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::inherited;

/// Shows a page. Returns whether there is a browser.
pub(super) fn show(page: &Path) -> bool {
    browser().is_some_and(|browser| starts(&browser, page))
}

/// The program that shows a page; `None` where there is no display for one.
fn browser() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let has_display = set("DISPLAY").is_some() || set("WAYLAND_DISPLAY").is_some();
    // $BROWSER can be a list. A browser in it may need no display.
    let first = set("BROWSER").and_then(|list| std::env::split_paths(&list).next());
    first.or_else(|| has_display.then(|| PathBuf::from("xdg-open")))
}

/// Starts the program with the page. It may outlive memtrace.
fn starts(browser: &Path, page: &Path) -> bool {
    let mut command = Command::new(browser);
    inherited::restore_umask(&mut command);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
