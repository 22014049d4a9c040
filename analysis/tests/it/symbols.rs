//! Names of native code: compared with binutils, with debug files in every possible place, and with invalid files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::native_objects::{C, CPP, Frames, RUST, addresses, compare, compile, id_of, look_up, tool};
use memtrace_analysis::symbols::Search;
use memtrace_trace::file::Budget;

/// Compares with binutils at addresses all over the object's code.
fn agree(object: &Path, step: u64) {
    let all = addresses(object, step);
    let compared = compare(object, &all);
    assert!(all.len() > 50 && compared.inlined > all.len() / 20, "{}: {compared:?}", object.display());
    assert_eq!(compared.other_files, 0, "{}", object.display());
    // The rest is named by symbols, and there binutils and memtrace differ.
    assert!(compared.named * 10 > compared.frames * 9, "{}: {compared:?}", object.display());
}

#[test]
fn functions_and_lines_agree_with_addr2line() {
    let folder = tempfile::tempdir().unwrap();
    for options in [&["-gdwarf-5"][..], &["-gdwarf-4"], &["-gdwarf-5", "-gz=zlib"], &["-gdwarf-4", "-O3"]] {
        agree(&compile(folder.path(), "c.c", C, options), 1);
        agree(&compile(folder.path(), "cpp.cpp", CPP, options), 1);
    }
}

#[test]
fn functions_and_lines_of_rust_agree_with_addr2line() {
    let folder = tempfile::tempdir().unwrap();
    agree(&compile(folder.path(), "rust.rs", RUST, &[]), 61);
}

/// An object with only its dynamic symbols, and the debug file with all that was removed.
fn stripped(folder: &Path) -> (PathBuf, PathBuf, PathBuf) {
    let whole = compile(folder, "cpp.cpp", CPP, &[]);
    let (debug, object) = (folder.join("away.debug"), folder.join("stripped.so"));
    tool("objcopy", &["--only-keep-debug".as_ref(), whole.as_os_str(), debug.as_os_str()]);
    tool("strip", &["-o".as_ref(), object.as_os_str(), whole.as_os_str()]);
    (whole, object, debug)
}

fn put(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    std::fs::copy(from, to).unwrap();
}

#[test]
fn debug_files_are_found_where_gdb_finds_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (whole, object, debug) = stripped(folder);
    let id = id_of(&whole);
    let all = addresses(&whole, 3);
    let (expected, _) = look_up(&whole, &id, &all, &Search::default());
    let search = Search {
        debug_roots: vec![folder.join("root")],
        debuginfod_cache: Some(folder.join("cache")),
        ..Search::default()
    };

    let (without, report) = look_up(&object, &id, &all, &search);
    assert!(
        report.addresses_with_line == 0 && report.addresses_with_function < report.addresses && report.notes.is_empty(),
        "{report:?}"
    );
    assert!(without.values().flatten().any(|(name, ..)| name == "work"), "dynamic symbols have names");
    assert!(without.values().flatten().any(|(name, ..)| name.starts_with("stripped.so+0x")));

    let (head, tail) = id.split_at(2);
    let linked = folder.join("linked.so");
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    tool("objcopy", &[&link, object.as_os_str(), linked.as_os_str()]);
    let below_root = folder.join("root").join(folder.strip_prefix("/").unwrap()).join("away.debug");
    for (object, place) in [
        (&object, folder.join(format!("root/.build-id/{head}/{tail}.debug"))),
        (&object, folder.join(format!("cache/{id}/debuginfo"))),
        (&linked, folder.join(".debug/away.debug")),
        (&linked, below_root),
    ] {
        std::fs::rename(&debug, folder.join("hidden")).unwrap();
        put(&folder.join("hidden"), &place);
        let (ours, report) = look_up(object, &id, &all, &search);
        assert!(ours == expected && report.notes.is_empty(), "{}: {report:?}", place.display());
        assert_eq!(report.symbol_file, place.to_str().unwrap());
        // Without the object the result is the same, except for debug links, which are in the object.
        if object.ends_with("stripped.so") {
            let (ours, _) = look_up(Path::new("/nowhere/libx.so"), &id, &all, &search);
            assert_eq!(ours, expected);
        }
        std::fs::remove_file(&place).unwrap();
        std::fs::rename(folder.join("hidden"), &debug).unwrap();
    }
    let (ours, _) = look_up(&linked, &id, &all, &search);
    assert_eq!(ours, expected, "beside the object");
}

#[test]
fn a_file_with_another_build_id_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (whole, object, _) = stripped(folder);
    let (id, all) = (id_of(&whole), addresses(&whole, 7));
    let other = compile(folder, "c.c", C, &[]);

    // The library has been replaced since the recording.
    let (ours, report) = look_up(&other, &id, &all, &Search::default());
    let file = other.file_name().unwrap().to_str().unwrap();
    for (address, frames) in &ours {
        let name = format!("{file}+{:#x}", address + 1);
        assert_eq!(*frames, [(name, other.to_str().unwrap().to_owned(), 0)]);
    }
    assert_eq!((report.addresses_with_function, report.notes.len()), (0, 1));
    assert!(report.notes[0].contains(&id) && report.notes[0].contains(&id_of(&other)), "{report:?}");

    // The debug file in the right place belongs to another object.
    let search = Search { debug_roots: vec![folder.join("root")], ..Search::default() };
    let (head, tail) = id.split_at(2);
    put(&other, &folder.join(format!("root/.build-id/{head}/{tail}.debug")));
    let (_, report) = look_up(&object, &id, &all, &search);
    assert!(
        report.addresses_with_line == 0 && report.notes.len() == 1 && report.notes[0].contains("a different file"),
        "{report:?}"
    );

    // debuginfod clients store an empty file to record that there is none; it causes no note.
    let search = Search { debuginfod_cache: Some(folder.join("cache")), ..Search::default() };
    std::fs::create_dir_all(folder.join("cache").join(&id)).unwrap();
    std::fs::write(folder.join("cache").join(&id).join("debuginfo"), "").unwrap();
    assert_eq!(look_up(&object, &id, &all, &search).1.notes, Vec::<String>::new());

    // An invalid build id becomes no path.
    let (_, report) = look_up(&object, "../../etc", &all, &search);
    assert_eq!((report.addresses_with_function, report.notes.len()), (0, 1));

    // A missing file, a file that is not regular, and a file that is not ELF.
    std::fs::write(folder.join("text.so"), "text").unwrap();
    for path in [folder.join("gone.so"), folder.to_owned(), "/dev/zero".into(), folder.join("text.so")] {
        let (_, report) = look_up(&path, &id, &all, &Search::default());
        assert!(report.addresses_with_function == 0 && report.notes.len() == 1, "{}: {report:?}", path.display());
    }
}

#[test]
fn an_object_without_a_build_id_is_identified_by_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let object = compile(folder.path(), "c.c", C, &["-Wl,--build-id=none"]);
    assert_eq!(id_of(&object), "");
    agree(&object, 1);
    let all = addresses(&object, 5);
    let ended = Search { ended_ns: Some(1_000_000_000), ..Search::default() };
    let (_, report) = look_up(&object, "", &all, &ended);
    assert!(report.addresses_with_function == 0 && report.notes[0].contains("changed after the run"), "{report:?}");
    let with_id = compile(folder.path(), "cpp.cpp", CPP, &[]);
    assert_eq!(look_up(&with_id, "", &all, &Search::default()).1.addresses_with_function, 0);
    // A debug file without a build id is found by its link, and must have the right checksum.
    let (debug, linked) = (folder.path().join("c.debug"), folder.path().join("linked.so"));
    tool("objcopy", &["--only-keep-debug".as_ref(), object.as_os_str(), debug.as_os_str()]);
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    tool("objcopy", &["--strip-all".as_ref(), &link, object.as_os_str(), linked.as_os_str()]);
    let (expected, _) = look_up(&object, "", &all, &Search::default());
    assert_eq!(look_up(&linked, "", &all, &Search::default()).0, expected);
    let mut bytes = std::fs::read(&debug).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&debug, bytes).unwrap();
    let (_, report) = look_up(&linked, "", &all, &Search::default());
    assert!(report.addresses_with_line == 0 && report.notes[0].contains("checksum"), "{report:?}");
}

#[test]
fn symbol_tables_name_what_dwarf_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let text = "
        .text
        .globl sized, bare, also_sized
        .type sized, @function
        .type also_sized, @function
        sized: nop; nop; nop; nop
        .size sized, . - sized
        nop; nop; nop; nop
        bare: nop; nop; nop; nop
        also_sized: nop; nop; nop; nop
        .size also_sized, 2
    ";
    let object = compile(folder.path(), "asm.s", text, &["-g0", "-nostdlib"]);
    let listing = tool("nm", &[object.as_os_str()]);
    let start = listing.lines().find(|l| l.ends_with(" sized")).and_then(|l| l.split(' ').next());
    let start = u64::from_str_radix(start.unwrap(), 16).unwrap();
    let all: Vec<u64> = (start..start + 16).collect();
    let (ours, _) = look_up(&object, &id_of(&object), &all, &Search::default());
    let names: Vec<&str> = all.iter().map(|a| ours[a][0].0.split('+').next().unwrap()).collect();
    let file = object.file_name().unwrap().to_str().unwrap();
    // A symbol with a size ends there. A symbol without one covers what follows, up to the next symbol.
    let expected = [["sized"; 4], [file; 4], ["bare"; 4], ["also_sized", "also_sized", file, file]];
    assert_eq!(names, expected.as_flattened());
}

#[test]
fn mini_debug_info_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (whole, object, _) = stripped(folder);
    let (id, all) = (id_of(&whole), addresses(&whole, 5));
    let symbols = folder.join("symbols");
    tool("objcopy", &["--strip-debug".as_ref(), whole.as_os_str(), symbols.as_os_str()]);
    tool("xz", &[symbols.as_os_str()]);
    let packed = folder.join("mini.so");
    let mut section = std::ffi::OsString::from("--add-section=.gnu_debugdata=");
    section.push(folder.join("symbols.xz"));
    tool("objcopy", &[&section, object.as_os_str(), packed.as_os_str()]);
    let (ours, report) = look_up(&packed, &id, &all, &Search::default());
    assert!(
        report.addresses_with_function == report.addresses
            && report.addresses_with_line == 0
            && report.notes.is_empty(),
        "{report:?}"
    );
    // The outermost function of each place is that of DWARF.
    let (expected, _) = look_up(&whole, &id, &all, &Search::default());
    let pieces = |name: &str| name.split(" [clone").next().unwrap().trim_end_matches(".cold").to_owned();
    for address in &all {
        assert_eq!(pieces(&ours[address][0].0), pieces(&expected[address].last().unwrap().0));
    }
}

/// Offset and length of the section with this name.
fn section(object: &Path, name: &str) -> (usize, usize) {
    let listing = tool("readelf", &["-SW".as_ref(), object.as_os_str()]);
    let line = listing.lines().find(|l| l.contains(&format!(" {name} "))).unwrap_or_else(|| panic!("no {name}"));
    let words: Vec<&str> = line.split(&format!(" {name} ")).nth(1).unwrap().split_whitespace().collect();
    let number = |i: usize| usize::from_str_radix(words[i], 16).unwrap();
    (number(2), number(3))
}

#[test]
fn a_cut_or_changed_file_loses_only_names() {
    let folder = tempfile::tempdir().unwrap();
    let whole = compile(folder.path(), "cpp.cpp", CPP, &[]);
    let (id, all) = (id_of(&whole), addresses(&whole, 11));
    let bytes = std::fs::read(&whole).unwrap();
    let (expected, _) = look_up(&whole, &id, &all, &Search::default());
    let damaged = folder.path().join("damaged.so");
    let mut explained = 0;
    for part in 0..64 {
        std::fs::write(&damaged, &bytes[..bytes.len() * part / 64]).unwrap();
        let (ours, report) = look_up(&damaged, &id, &all, &Search::default());
        assert!(
            report.addresses_with_function == report.addresses || !report.notes.is_empty(),
            "cut at {part}/64: {report:?}"
        );
        explained += usize::from(!report.notes.is_empty());
        for (address, frames) in ours {
            let known = frames[0].0.starts_with("damaged.so+") || frames == expected[&address];
            assert!(known, "cut at {part}/64: {address:#x} {frames:?}");
        }
    }
    assert!(explained > 32, "{explained}");
    // Changed bytes can change names, but nothing else.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let names = [".debug_info", ".debug_abbrev", ".debug_line", ".debug_rnglists", ".debug_str", ".symtab", ".strtab"];
    let parts: Vec<_> = names.iter().map(|name| section(&whole, name)).collect();
    for round in 0..400 {
        let mut bytes = bytes.clone();
        let (offset, len) = if round % 8 == 7 { (0, bytes.len()) } else { parts[round % 8 % parts.len()] };
        for _ in 0..=round % 5 {
            bytes[offset + random(len)] = random(256) as u8;
        }
        std::fs::write(&damaged, &bytes).unwrap();
        let (ours, _) = look_up(&damaged, &id, &all, &Search::default());
        assert_eq!(ours.len(), all.len());
    }
}

#[test]
fn false_sizes_in_a_file_cost_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let object = compile(folder.path(), "c.c", C, &["-gz=zlib"]);
    let (id, all) = (id_of(&object), addresses(&object, 1));
    let bytes = std::fs::read(&object).unwrap();
    let (offset, _) = section(&object, ".debug_info");
    // Elf64_Chdr: type, reserved, size, alignment.
    for (claim, what) in [(1_u64 << 60, "more than the limit"), (1 << 30, "length differs"), (3, "length differs")] {
        let mut bytes = bytes.clone();
        bytes[offset + 8..offset + 16].copy_from_slice(&claim.to_le_bytes());
        std::fs::write(&object, &bytes).unwrap();
        let (_, report) = look_up(&object, &id, &all, &Search::default());
        assert!(report.addresses_with_function == report.addresses && report.addresses_with_line == 0, "{report:?}");
        assert!(report.notes.len() == 1 && report.notes[0].contains(what), "{report:?}");
    }
}

#[test]
fn dwarf_with_too_many_rows_is_abandoned() {
    let folder = tempfile::tempdir().unwrap();
    // 20,000 units share one line program of 200,000 rows: 4 * 10^9 rows if each unit is read.
    let text = "
        .text
        .globl f
        .type f, @function
        f: .fill 4096, 1, 0x90
        .size f, . - f
        .section .debug_abbrev,\"\",@progbits
        .byte 1, 0x11, 0, 0x10, 0x17, 0, 0, 0
        .section .debug_info,\"\",@progbits
        .rept 20000
        .long 13
        .short 4
        .long 0
        .byte 8, 1
        .long 0
        .byte 0
        .endr
        .section .debug_line,\"\",@progbits
        .long 2f - 1f
        1: .short 4
        .long 4f - 3f
        3: .byte 1, 1, 1, 0xfb, 14, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0
        .asciz \"x.c\"
        .byte 0, 0, 0, 0
        4: .byte 0, 9, 2
        .quad f
        .fill 200000, 1, 0x20
        .byte 0, 1, 1
        2:
    ";
    let object = compile(folder.path(), "bomb.s", text, &["-g0", "-nostdlib"]);
    let listing = tool("nm", &[object.as_os_str()]);
    let start = listing.lines().find(|l| l.ends_with(" f")).and_then(|l| l.split(' ').next()).unwrap();
    let start = u64::from_str_radix(start, 16).unwrap();
    let (ours, report) = look_up(&object, &id_of(&object), &[start + 9], &Search::default());
    assert_eq!(ours[&(start + 9)][0].0, "f");
    assert!(report.notes.len() == 1 && report.notes[0].contains("more reads than"), "{report:?}");
}

#[test]
fn lookups_of_two_processes_are_merged() {
    // Two processes of a run use the same object: strings and places are merged.
    use memtrace_analysis::symbols::Symbols;
    let folder = tempfile::tempdir().unwrap();
    let object = compile(folder.path(), "cpp.cpp", CPP, &[]);
    let (id, all) = (id_of(&object), addresses(&object, 3));
    let (expected, report) = look_up(&object, &id, &all, &Search::default());
    let mut symbols = Symbols::default();
    for part in all.chunks(all.len() / 3) {
        let part = crate::native_objects::definitions(&object, &id, part);
        assert!(symbols.resolve_missing([&part], &Search::default(), &Budget::default()));
    }
    let mut definitions = crate::native_objects::definitions(&object, &id, &all);
    assert!(
        !symbols.resolve_missing([&definitions], &Search::default(), &Budget::default()),
        "nothing is left to look up"
    );
    std::fs::write(folder.path().join("symbols.json"), symbols.to_json()).unwrap();
    let read = Symbols::read(&memtrace_analysis::RunFolder::open(folder.path()).unwrap()).unwrap().unwrap();
    assert_eq!(read, symbols);
    assert_eq!(read.report([&definitions]), [report]);
    read.symbolize(&mut definitions, &Budget::default());
    let ours: BTreeMap<u64, Frames> = crate::native_objects::frames(&definitions, &all);
    assert_eq!(ours, expected);
}
