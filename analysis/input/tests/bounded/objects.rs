//! Object files that a trace names: holes, endless tables, and compressed sections.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use memtrace_input::Budget;
use memtrace_input::symbols::{Search, Symbols, build_id};
use memtrace_trace::file::{Definitions, Module, NativeFrame};
use memtrace_trace::ids::{FrameId, ModuleId};

use crate::measured::{Cost, allowed, measure};

const PT_NOTE: u32 = 4;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const SHF_COMPRESSED: u64 = 1 << 11;

/// A header of a 64-bit ELF file: one program header and a table of sections.
fn elf_header(sections_at: u64, sections: u16, names: u16) -> Vec<u8> {
    let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    header.extend(3u16.to_le_bytes());
    header.extend(62u16.to_le_bytes());
    header.extend(1u32.to_le_bytes());
    header.extend([0u64, 64, sections_at].iter().flat_map(|n| n.to_le_bytes()));
    header.extend(0u32.to_le_bytes());
    header.extend([64u16, 56, 1, 64, sections, names].iter().flat_map(|n| n.to_le_bytes()));
    assert_eq!(header.len(), 64);
    header
}

fn program_header(kind: u32, offset: u64, size: u64) -> Vec<u8> {
    let mut header = [kind, 4].iter().flat_map(|n: &u32| n.to_le_bytes()).collect::<Vec<u8>>();
    header.extend([offset, 0, 0, size, size, 4].iter().flat_map(|n: &u64| n.to_le_bytes()));
    header
}

fn section_header(name: u32, kind: u32, flags: u64, (offset, size): (u64, u64), link: u32, entry: u64) -> Vec<u8> {
    let mut header = [name, kind].iter().flat_map(|n: &u32| n.to_le_bytes()).collect::<Vec<u8>>();
    header.extend([flags, 0, offset, size].iter().flat_map(|n: &u64| n.to_le_bytes()));
    header.extend([link, 0].iter().flat_map(|n: &u32| n.to_le_bytes()));
    header.extend([8, entry].iter().flat_map(|n: &u64| n.to_le_bytes()));
    header
}

/// Looks up a few addresses of the object at `path`. Returns the notes about it.
fn look_up(path: &Path, addresses: u32) -> (Vec<String>, Cost, Budget) {
    let id = build_id(path).ok().flatten().unwrap_or_default();
    let module = Module { path: path.to_str().unwrap().into(), build_id: id.as_str().into() };
    let mut definitions = Definitions { modules: vec![Module::default(), module], ..Definitions::default() };
    for address in 1..=addresses {
        let frame = NativeFrame { module: ModuleId(1), address: address.into() };
        definitions.native_frames.insert(FrameId(address), frame);
    }
    let budget = Budget::default();
    let (symbols, cost) = measure(|| {
        let mut symbols = Symbols::default();
        symbols.resolve_missing([&definitions], &Search::default(), &budget);
        symbols
    });
    let notes = symbols.report([&definitions]).remove(0).notes;
    (notes, cost, budget)
}

/// Requires that reading took no more work than the budget, apart from the last step.
fn assert_bounded(path: &Path, cost: Cost, budget: &Budget) {
    let size = memtrace_trace::file::untrusted::stored_len(&File::open(path).unwrap()).unwrap();
    assert!(cost.peak <= allowed(size as usize), "{cost:?}");
    let limit = (128 << 20) + 256 * size;
    assert!(budget.done() <= limit + (64 << 20), "{} steps of {limit}", budget.done());
}

#[test]
fn holes_are_not_scanned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lib.so");
    let file = File::create(&path).unwrap();
    let (hole, len) = (4096u64, 4u64 << 40);
    let sections = [
        section_header(0, 0, 0, (0, 0), 0, 0),
        section_header(0, SHT_SYMTAB, 0, (hole, len - 2 * hole), 2, 24),
        section_header(0, SHT_STRTAB, 0, (hole, len - 2 * hole), 0, 0),
    ]
    .concat();
    file.write_all_at(&elf_header(512, 3, 2), 0).unwrap();
    file.write_all_at(&program_header(PT_NOTE, hole, len - 2 * hole), 64).unwrap();
    file.write_all_at(&sections, 512).unwrap();
    file.set_len(len).unwrap();
    let (notes, cost, budget) = look_up(&path, 1000);
    assert_eq!(notes, [format!("{} is a sparse file", path.display())]);
    assert_eq!(build_id(&path).unwrap_err(), "is a sparse file");
    assert!(budget.done() < 1000 && cost.peak < 1 << 20, "{cost:?} {}", budget.done());
}

/// A note segment, a symbol table and names that are as long as the file, and a table of sections that overlaps them.
#[test]
fn tables_over_the_whole_file_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lib.so");
    // Symbols that contain every address, and names without an end.
    let mut symbol = 1u32.to_le_bytes().to_vec();
    symbol.extend([2, 0, 1, 0]);
    symbol.extend([0u64, u64::MAX].iter().flat_map(|n| n.to_le_bytes()));
    let symbols = symbol.repeat(100_000);
    let end = 4096 + symbols.len() as u64;
    let names = vec![b'x'; 1 << 20];
    let sections = [
        section_header(0, 0, 0, (0, 0), 0, 0),
        section_header(0, SHT_SYMTAB, 0, (4096, symbols.len() as u64), 2, 24),
        section_header(0, SHT_STRTAB, 0, (end, names.len() as u64), 0, 0),
    ]
    .concat();
    let mut object = elf_header(512, 3, 2);
    object.extend(program_header(PT_NOTE, 4096, symbols.len() as u64));
    object.resize(512, 0);
    object.extend(sections);
    object.resize(4096, 0);
    object.extend(symbols);
    object.extend(names);
    std::fs::write(&path, object).unwrap();
    let (notes, cost, budget) = look_up(&path, 100_000);
    assert!(notes.iter().any(|note| note.contains("too many of its symbols overlap")), "{notes:?}");
    assert_bounded(&path, cost, &budget);
}

#[test]
fn compressed_sections_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lib.so");
    const LEN: u64 = 1 << 30;
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    std::io::copy(&mut std::io::Read::take(std::io::repeat(0), LEN), &mut encoder).unwrap();
    let compressed = encoder.finish().unwrap();
    let mut info = [2u32, 0].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    info.extend([LEN, 1].iter().flat_map(|n| n.to_le_bytes()));
    info.extend(compressed);
    assert!(info.len() < 100_000);
    let names = b"\0.debug_info\0.debug_abbrev\0";
    let at = 4096 + names.len() as u64;
    let sections = [
        section_header(0, 0, 0, (0, 0), 0, 0),
        section_header(1, 1, SHF_COMPRESSED, (at, info.len() as u64), 0, 0),
        section_header(13, 1, SHF_COMPRESSED, (at, info.len() as u64), 0, 0),
        section_header(0, SHT_STRTAB, 0, (4096, names.len() as u64), 0, 0),
    ]
    .concat();
    let mut object = elf_header(512, 4, 3);
    object.resize(512, 0);
    object.extend(sections);
    object.resize(4096, 0);
    object.extend(names);
    object.extend(info);
    std::fs::write(&path, object).unwrap();
    let (notes, cost, budget) = look_up(&path, 10);
    assert!(notes.iter().any(|note| note.contains("it needs more memory than ")), "{notes:?}");
    assert_bounded(&path, cost, &budget);
}

/// A trace can name one object by any number of paths. The object gives its allowance once.
#[test]
fn an_object_with_many_paths_is_paid_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lib.so");
    let mut object = elf_header(0, 0, 0);
    object.resize(1 << 20, 0);
    std::fs::write(&path, object).unwrap();
    let mut modules = vec![Module::default()];
    let mut definitions = Definitions::default();
    for n in 1..=100u32 {
        let dots = "./".repeat(n as usize);
        modules.push(Module { path: format!("{}/{dots}lib.so", folder.path().display()).into(), build_id: "".into() });
        definitions.native_frames.insert(FrameId(n), NativeFrame { module: ModuleId(n), address: 1 });
    }
    definitions.modules = modules;
    let budget = Budget::default();
    Symbols::default().resolve_missing([&definitions], &Search::default(), &budget);
    assert!(budget.work_left() <= (128 << 20) + 256 * (1 << 20), "{}", budget.work_left());
}
