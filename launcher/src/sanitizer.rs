//! Programs built with a sanitizer whose runtime is a shared library.
//!
//! AddressSanitizer's runtime ends a program in which another library was loaded before it, because that library could
//! replace `malloc`. memtrace's library replaces nothing that the runtime does. It therefore answers the runtime's
//! question for default options (`__asan_default_options`), in every process. A program that answers the question
//! itself gets the option in `ASAN_OPTIONS`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// The variable with options for AddressSanitizer.
pub(crate) const ASAN_OPTIONS: &str = "ASAN_OPTIONS";
/// The option that allows other libraries before the runtime.
const LINK_ORDER: &str = "verify_asan_link_order";

/// The file names of sanitizer runtimes, up to their versions: those of gcc, then those of clang.
const RUNTIMES: [&str; 10] = [
    "libasan.so",
    "libhwasan.so",
    "liblsan.so",
    "libtsan.so",
    "libubsan.so",
    "libclang_rt.asan",
    "libclang_rt.hwasan",
    "libclang_rt.memprof",
    "libclang_rt.tsan",
    "libclang_rt.ubsan",
];

/// Whether this entry of `LD_PRELOAD` is the runtime of a sanitizer.
pub(crate) fn is_runtime(entry: &[u8]) -> bool {
    let name = Path::new(OsStr::from_bytes(entry)).file_name().map(OsStrExt::as_bytes).unwrap_or_default();
    RUNTIMES.iter().any(|runtime| name.starts_with(runtime.as_bytes()))
}

/// Whether the library with this name is AddressSanitizer's runtime.
pub(crate) fn is_asan(name: &[u8]) -> bool {
    ["libasan.so", "libclang_rt.asan"].iter().any(|runtime| name.starts_with(runtime.as_bytes()))
}

/// The value of [`ASAN_OPTIONS`] that allows memtrace's library before the runtime. `None` if the user has decided
/// that.
pub(crate) fn asan_options(before: Option<&OsStr>) -> Option<OsString> {
    let before = before.unwrap_or_default().as_bytes();
    if before.windows(LINK_ORDER.len()).any(|part| part == LINK_ORDER.as_bytes()) {
        return None;
    }
    let mut options = before.to_vec();
    if !options.is_empty() {
        options.push(b':');
    }
    options.extend_from_slice(format!("{LINK_ORDER}=0").as_bytes());
    Some(OsString::from_vec(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_recognized() {
        for name in ["libasan.so.8", "/usr/lib/libtsan.so.2", "/x/libclang_rt.asan-x86_64.so"] {
            assert!(is_runtime(name.as_bytes()), "{name}");
        }
        for name in ["libc.so.6", "/libasan.so.8/other.so", "", "/opt/mylibasan.so"] {
            assert!(!is_runtime(name.as_bytes()), "{name}");
        }
        assert!(is_asan(b"libasan.so.6") && !is_asan(b"libtsan.so.2"));
    }

    #[test]
    fn options_of_the_user_are_kept() {
        let options = |before: Option<&str>| {
            asan_options(before.map(OsStr::new)).map(|options| options.into_string().unwrap_or_default())
        };
        assert_eq!(options(None).as_deref(), Some("verify_asan_link_order=0"));
        assert_eq!(options(Some("detect_leaks=0")).as_deref(), Some("detect_leaks=0:verify_asan_link_order=0"));
        assert_eq!(options(Some("verify_asan_link_order=1")), None);
    }
}
