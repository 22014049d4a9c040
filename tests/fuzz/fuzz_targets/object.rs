//! An object file: ELF with DWARF and symbol tables, compressed or not, linked to others or not. Looks up names and
//! lines at fuzzed addresses.
//!
//! The input has four addresses of four bytes, then the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::symbols::{Search, Symbols, build_id};
use memtrace_fuzz::Folder;
use memtrace_trace::file::{Budget, Definitions, Module, NativeFrame};
use memtrace_trace::ids::{FrameId, ModuleId};

fuzz_target!(|data: &[u8]| {
    let Some((addresses, file)) = data.split_at_checked(16) else { return };
    let folder = Folder::here();
    folder.put("object", file);
    let path = folder.path().join("object");
    let Ok(id) = build_id(&path) else { return };
    let text = |path: &std::path::Path| path.to_str().expect("UTF-8").into();
    let module = Module { path: text(&path), build_id: id.unwrap_or_default().into() };
    let modules = vec![Module::default(), module];
    let mut definitions = Definitions { modules, ..Definitions::default() };
    for (index, address) in addresses.as_chunks::<4>().0.iter().enumerate() {
        let address = u32::from_le_bytes(*address).into();
        definitions.native_frames.insert(FrameId(index as u32 + 1), NativeFrame { module: ModuleId(1), address });
    }
    let search = Search { debug_roots: vec![folder.path().into()], ..Search::default() };
    let mut symbols = Symbols::default();
    let budget = Budget::default();
    symbols.resolve_missing([&definitions], &search, &budget);
    symbols.symbolize(&mut definitions, &budget);
    for id in 1..=4 {
        assert!(definitions.frame(FrameId(id)).is_some(), "every place has a name, if only its number");
    }
});
