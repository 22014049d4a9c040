//! Tells the launcher that this library is loaded in the process.
//!
//! The launcher checks each new program from outside, because no code of a program without this library can report that
//! it is not recorded. A program that ends within a millisecond may have ended before the check. The kernel reports two
//! settings of the thread's name to the launcher (`PROC_EVENT_COMM` of linux/cn_proc.h), which needs no descriptor and
//! no permission. The name stays as it is.

use std::ffi::c_char;

use memtrace_trace::options::ENV;

use crate::arch::prctl;

unsafe extern "C" {
    /// The environment (environ(7)). Only glibc's loader passes it to constructors.
    static environ: *const *const c_char;
}

/// The constructor. It calls no function of the C library, because a sanitizer's runtime may not be initialized yet.
extern "C" fn announce() {
    // SAFETY: the C library sets this variable before constructors run, and no other thread runs yet.
    if unsafe { has_session(environ) } {
        set_same_name();
    }
}

fn set_same_name() {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes and reads at most 16 bytes of `name` (prctl(2)).
    unsafe {
        if prctl(libc::PR_GET_NAME, name.as_mut_ptr()) == 0 {
            prctl(libc::PR_SET_NAME, name.as_mut_ptr());
            prctl(libc::PR_SET_NAME, name.as_mut_ptr());
        }
    }
}

/// Whether the launcher's variable is in the environment.
///
/// # Safety
///
/// `environment` is null or a list of C strings that ends with a null pointer.
unsafe fn has_session(mut environment: *const *const c_char) -> bool {
    if environment.is_null() {
        return false;
    }
    // SAFETY: the caller guarantees that the list ends with a null pointer, and that its entries are C strings.
    unsafe {
        while !(*environment).is_null() {
            // A comparison that ends at the first difference does not read behind the string.
            let variable = (*environment).cast::<u8>();
            if ENV.bytes().chain([b'=']).enumerate().all(|(i, byte)| *variable.add(i) == byte) {
                return true;
            }
            environment = environment.add(1);
        }
    }
    false
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = announce;

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn the_session_is_found_in_the_environment_by_its_whole_name() {
        let variables = |variables: &[&CStr]| {
            let mut list: Vec<_> = variables.iter().map(|variable| variable.as_ptr()).collect();
            list.push(std::ptr::null());
            // SAFETY: the list ends with a null pointer.
            unsafe { has_session(list.as_ptr()) }
        };
        assert!(variables(&[c"PATH=/bin", c"MEMTRACE_SESSION=x"]));
        assert!(!variables(&[c"PATH=/bin", c"MEMTRACE_SESSIONS=x", c"XMEMTRACE_SESSION=x"]));
        assert!(!variables(&[]));
        // SAFETY: null is allowed.
        assert!(!unsafe { has_session(std::ptr::null()) });
    }

    #[test]
    fn the_name_of_the_thread_stays() {
        let name = || std::fs::read_to_string("/proc/thread-self/comm").unwrap();
        let before = name();
        set_same_name();
        assert_eq!(name(), before);
    }
}
