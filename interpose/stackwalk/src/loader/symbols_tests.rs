//! Compares lookups with the answers of the C library's `dlsym`.

use std::ffi::{CStr, CString, c_void};
use std::process::Command;

use super::*;

/// The names of the symbols that `nm` lists for a library: those that it defines, without local ones. Thread-local
/// variables are left out.
fn names(path: &str) -> Vec<CString> {
    let output = Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(path).output().expect("nm");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut names: Vec<CString> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(kind)) = (words.next(), words.next()) else { continue };
        // `A` is the name of a version. Upper case letters and `u`, `i`, `w`, `v` are exported symbols.
        if kind == "A" || kind == "D" && name.starts_with("errno") {
            continue;
        }
        let name = name.split('@').next().unwrap_or(name);
        names.push(CString::new(name).unwrap());
    }
    names.sort();
    names.dedup();
    names
}

fn dlsym(handle: *mut c_void, name: &CStr) -> usize {
    // SAFETY: `handle` is a special one or comes from `dlopen`.
    unsafe { libc::dlsym(handle, name.as_ptr()) }.expose_provenance()
}

fn dlopen(name: &CStr) -> *mut c_void {
    // SAFETY: a C string.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "{name:?}");
    handle
}

/// Whether `dlsym` returns the address of a thread-local variable, which differs between threads.
fn is_thread_local(handle: *mut c_void, name: &CStr) -> bool {
    let (handle, here) = (handle.expose_provenance(), dlsym(handle, name));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| dlsym(std::ptr::with_exposed_provenance_mut(handle), name));
        other.join().unwrap() != here
    })
}

#[test]
fn every_symbol_of_a_library_is_found_as_dlsym_finds_it() {
    // libc has versions, hidden versions, indirect functions and thread-local variables. libstdc++ has unique symbols.
    let libraries = [c"libc.so.6", c"libm.so.6", c"libstdc++.so.6", c"libgcc_s.so.1", c"libresolv.so.2", c"libz.so.1"];
    let mut compared = 0;
    for library in libraries {
        let handle = dlopen(library);
        let reading = Reading::begin();
        let object = reading.library(library.to_bytes()).expect("a loaded library");
        let path = object.with_path(&reading, |path| path.to_str().unwrap().to_owned());
        drop(reading);
        for name in names(&path) {
            let expected = dlsym(handle, &name);
            let reading = Reading::begin();
            let found = symbol_of_object_and_dependencies(&reading, &object, &name);
            drop(reading);
            if found != expected {
                assert!(
                    found == 0 && is_thread_local(handle, &name),
                    "{name:?} of {library:?}: {found:#x} {expected:#x}"
                );
            }
            compared += 1;
        }
    }
    assert!(compared > 5_000, "{compared} symbols");
}

#[test]
fn names_without_a_default_version_are_not_found() {
    // glibc keeps these for old programs only: `@GLIBC_2.2.5` without a second `@`.
    let libc = dlopen(c"libc.so.6");
    let reading = Reading::begin();
    let object = reading.library(b"libc.so.6").unwrap();
    for name in [c"sys_errlist", c"__malloc_hook", c"no such symbol"] {
        assert_eq!(symbol_of_object_and_dependencies(&reading, &object, name), dlsym(libc, name), "{name:?}");
    }
}

#[test]
fn dependencies_are_searched_breadth_first() {
    let handle = dlopen(c"libstdc++.so.6");
    let reading = Reading::begin();
    let object = reading.library(b"libstdc++.so.6").unwrap();
    // From libstdc++ itself, libm, libgcc_s and libc.
    for name in [c"_ZSt4cout", c"cos", c"_Unwind_Backtrace", c"malloc", c"memcpy", c"_dl_find_object"] {
        let found = symbol_of_object_and_dependencies(&reading, &object, name);
        assert_eq!(found, dlsym(handle, name), "{name:?}");
        assert_ne!(found, 0, "{name:?}");
    }
}

#[test]
fn global_lookups_equal_those_of_dlsym() {
    for name in
        [c"malloc", c"memcpy", c"strlen", c"dlsym", c"pthread_create", c"environ", c"__tls_get_addr", c"nothing"]
    {
        assert_eq!(first_symbol(name), dlsym(libc::RTLD_DEFAULT, name), "{name:?}");
    }
    // This code belongs to the executable, so the next object is the first library.
    for name in [c"malloc", c"memcpy", c"dlclose", c"nothing"] {
        let found = next_symbol(name, None).map_or(0, |next| next.address);
        assert_eq!(found, dlsym(libc::RTLD_NEXT, name), "{name:?}");
    }
    assert!(next_symbol(c"malloc", Some(1)).is_none(), "the first object is this one");
}

#[test]
fn the_c_librarys_functions_are_found() {
    for name in [c"mmap", c"memcpy", c"memmove", c"strlen", c"open64", c"pthread_getattr_np", c"dl_iterate_phdr"] {
        assert_eq!(c_library_symbol(name), dlsym(libc::RTLD_NEXT, name), "{name:?}");
    }
    assert_eq!(c_library_symbol(c"_Unwind_Backtrace"), 0);
}

#[test]
fn lookups_in_sysv_tables_work() {
    // The executable or a library with `DT_HASH` alone is rare. A C compiler makes one.
    let folder = std::env::temp_dir().join(format!("memtrace-hash-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("sysv.c"), folder.join("libsysv.so"));
    std::fs::write(&source, "int one(void) { return 1; } int two = 2; static int hidden; int *three = &hidden;")
        .unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-nostdlib", "-Wl,--hash-style=sysv", "-o"])
        .args([&library, &source])
        .status();
    assert!(status.expect("cc").success());
    let path = CString::new(library.to_str().unwrap()).unwrap();
    let handle = dlopen(&path);
    let reading = Reading::begin();
    let object = reading.object_of_file(b"libsysv.so").expect("a loaded library");
    for name in [c"one", c"two", c"three", c"hidden", c"four"] {
        let found = object.symbol(&reading, &SymbolName::new(name.to_bytes()));
        assert_eq!(found.unwrap_or(0), dlsym(handle, name), "{name:?}");
    }
    assert!(object.symbol_with_prefix(&reading, b"thr").is_some());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn reads_while_an_object_is_unloaded_do_not_fault() {
    permit_checked_reads();
    unloading();
    let reading = Reading::begin();
    assert_eq!(reading.read::<usize>(8), None, "an address that is not mapped");
    let object = reading.library(b"libc.so.6").expect("the C library");
    let found = object.symbol(&reading, &SymbolName::new(b"dlclose"));
    assert_eq!(found, Some(dlsym(libc::RTLD_DEFAULT, c"dlclose")));
    drop(reading);
    unloaded(false);
}

#[test]
fn objects_may_be_loaded_and_unloaded_meanwhile() {
    permit_checked_reads();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_ne!(first_symbol(c"malloc"), 0);
                    assert_eq!(first_symbol(c"no such symbol"), 0);
                }
            });
        }
        for _ in 0..60 {
            let library = dlopen(c"libnss_hesiod.so.2");
            unloading();
            // SAFETY: the handle is valid and closed once.
            assert_eq!(unsafe { libc::dlclose(library) }, 0);
            unloaded(true);
        }
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
