//! Checks the layers of ARCHITECTURE.md: which crate uses which, which part of a crate uses which, that files do not
//! use each other in circles, that no crate grows out of proportion, and that recipes of CONTRIBUTING.md are complete.

#[path = "architecture/file_graph.rs"]
mod file_graph;
#[path = "architecture/hooked_functions.rs"]
mod hooked_functions;
#[path = "architecture/recipes.rs"]
mod recipes;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use file_graph::FileGraph;
use memtrace_tests::traced_program::root;

/// The crates of the product.
const PRODUCT: &[&str] = &[
    "trace",
    "interpose",
    "interpose/stackwalk",
    "launcher",
    "analysis",
    "analysis/input",
    "analysis/replay",
    "analysis/insight",
    "analysis/output",
    "analysis/summary",
    "analysis/report",
    "analysis/rewrite",
];

/// The crates of the simulated CUDA.
const SIMULATE: &[&str] = &["simulate", "simulate/build", "simulate/driver", "simulate/libs", "simulate/runtime"];

/// The largest number of fields of a struct, apart from options, schema types and structs of a fixed layout.
const MAX_FIELDS: usize = 12;

/// The types of `trace` that a section of FORMAT.md describes: an event, and the definitions of a trace by kind. They
/// have a field for each value of that section.
const FORMAT_TYPES: &[(&str, &str)] = &[("Event", "Block of events"), ("Definitions", "Definition")];

/// Parts of crates that must not use other parts: the crate, a module, and the modules that it must not use.
const FORBIDDEN: &[(&str, &str, &[&str])] = &[
    ("interpose", "linker", &["cpython", "recording", "cuda", "torch", "observers"]),
    ("interpose", "cpython", &["recording", "cuda", "torch", "observers"]),
    ("interpose", "recording", &["cpython", "cuda", "torch", "observers"]),
    ("interpose", "torch", &["cpython", "cuda", "observers"]),
    ("interpose", "cuda", &["cpython", "observers"]),
    ("launcher", "drain", &["commands", "cli"]),
    // The server reads runs through the binary, so that whatever a run has cannot end the server.
    (
        "launcher",
        "mcp",
        &["cli", "commands", "drain", "folder", "library", "manifest", "message", "proc", "sandbox", "session"],
    ),
    ("analysis/input", "symbols", &["load", "recording", "trace_index"]),
    ("analysis/insight", "rules", &["passes"]),
    ("analysis/insight", "passes", &["suggestions"]),
];

fn graph(folder: &str) -> FileGraph {
    let source = Path::new(folder).join("src");
    let root_files = ["lib.rs", "main.rs"].map(|name| source.join(name));
    let root_file = root_files.iter().find(|file| root().join(file).exists());
    FileGraph::read(&root(), root_file.unwrap_or_else(|| panic!("{folder} has no root module")))
}

/// The source files of a crate, relative to the repository.
fn sources(folder: &str) -> BTreeSet<PathBuf> {
    let (mut found, mut todo) = (BTreeSet::new(), vec![Path::new(folder).join("src")]);
    while let Some(at) = todo.pop() {
        for name in std::fs::read_dir(root().join(&at)).unwrap().map(|entry| entry.unwrap().file_name()) {
            let path = at.join(name);
            if root().join(&path).is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.insert(path);
            }
        }
    }
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// The table of ARCHITECTURE.md: for each folder, the folders that it may use.
fn table() -> BTreeMap<String, BTreeSet<String>> {
    let text = read(Path::new("ARCHITECTURE.md"));
    let in_backticks = |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let rows: Vec<(String, Vec<String>)> = text
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            let folder = in_backticks(cells[0])[0].trim_end_matches('/').to_owned();
            // Text after a semicolon is an explanation.
            let names = in_backticks(cells.last().unwrap().split(';').next().unwrap_or_default());
            (folder, names)
        })
        .collect();
    let folder_of = |name: &String| {
        let is_named = |folder: &&String| folder.rsplit('/').next() == Some(name.as_str());
        let folders: Vec<&String> = rows.iter().map(|(folder, _)| folder).filter(is_named).collect();
        assert_eq!(folders.len(), 1, "ARCHITECTURE.md has one row for `{name}`");
        folders[0].clone()
    };
    rows.iter().map(|(folder, names)| (folder.clone(), names.iter().map(folder_of).collect())).collect()
}

#[test]
fn crates_use_only_what_the_table_allows() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let repository = PathBuf::from(metadata["workspace_root"].as_str().unwrap());
    let table = table();
    let row_of = |folder: &Path| {
        let folder = folder.strip_prefix(&repository).unwrap();
        let rows = table.keys().filter(|row| folder.starts_with(row));
        let row = rows.max_by_key(|row| row.len());
        row.unwrap_or_else(|| panic!("ARCHITECTURE.md has no row for {}", folder.display())).clone()
    };
    let mut used: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let manifest = PathBuf::from(package["manifest_path"].as_str().unwrap());
        let row = row_of(manifest.parent().unwrap());
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let ours = dependencies.filter(|dependency| dependency["kind"] != "dev").filter_map(|d| d["path"].as_str());
        let ours: BTreeSet<String> = ours.map(|path| row_of(Path::new(path))).filter(|other| *other != row).collect();
        used.entry(row).or_default().extend(ours);
    }
    for folder in PRODUCT {
        assert!(used.contains_key(*folder), "{folder} is a crate");
    }
    for (folder, used) in &used {
        assert_eq!(*used, table[folder], "what {folder} uses (left), and what ARCHITECTURE.md says (right)");
    }
}

#[test]
fn no_crate_has_more_than_a_third_of_the_lines() {
    let lines = |folder: &str| sources(folder).iter().map(|file| read(file).lines().count()).sum::<usize>();
    let lines: BTreeMap<&str, usize> = PRODUCT.iter().map(|folder| (*folder, lines(folder))).collect();
    let total: usize = lines.values().sum();
    for (folder, lines) in &lines {
        assert!(lines * 3 <= total, "{folder} has {lines} of {total} lines");
    }
}

/// Whether the struct describes a format: options, JSON, or a layout in memory.
fn describes_a_format(item: &syn::ItemStruct) -> bool {
    item.attrs.iter().any(|attribute| {
        let names = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
        let derives = ["Serialize", "Deserialize", "Args", "Parser"].iter().any(|name| names.contains(name));
        attribute.path().is_ident("derive") && derives || attribute.path().is_ident("repr") && names.contains('C')
    })
}

/// The structs of a crate with more than [`MAX_FIELDS`] fields, apart from those that describe a format.
fn large_structs(folder: &str) -> Vec<syn::ItemStruct> {
    struct Large(Vec<syn::ItemStruct>);
    impl<'ast> syn::visit::Visit<'ast> for Large {
        fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
            if item.fields.len() > MAX_FIELDS && !describes_a_format(item) {
                self.0.push(item.clone());
            }
        }
    }
    let mut large = Large(Vec::new());
    for file in sources(folder) {
        let syntax = syn::parse_file(&read(&file)).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        syn::visit::Visit::visit_file(&mut large, &syntax);
    }
    large.0
}

#[test]
fn structs_have_few_fields() {
    let is_of_format = |folder: &str, name: &str| {
        folder == "trace" && FORMAT_TYPES.iter().any(|(format_type, _)| *format_type == name)
    };
    let large: Vec<String> = PRODUCT
        .iter()
        .flat_map(|folder| large_structs(folder).into_iter().map(|item| (*folder, item.ident.to_string())))
        .filter(|(folder, name)| !is_of_format(folder, name))
        .map(|(folder, name)| format!("{folder}: {name}"))
        .collect();
    assert!(large.is_empty(), "structs of more than {MAX_FIELDS} fields: {large:?}");
}

#[test]
fn the_format_describes_each_field_of_its_types() {
    let format = read(Path::new("trace/FORMAT.md"));
    let large = large_structs("trace");
    for (name, title) in FORMAT_TYPES {
        let (_, section) = format.split_once(&format!("\n## {title}\n")).expect("FORMAT.md has the section");
        let section = section.split("\n## ").next().unwrap_or_default().to_lowercase();
        let item = large.iter().find(|item| item.ident == name).expect("a large struct of trace has the name");
        for field in item.fields.iter().filter_map(|field| field.ident.as_ref()).map(ToString::to_string) {
            let is_described = |word: &str| section.contains(word.trim_end_matches('s'));
            assert!(field.split('_').all(is_described), "the section {title} does not describe {name}::{field}");
        }
    }
}

#[test]
fn every_source_file_is_read() {
    for folder in PRODUCT.iter().chain(SIMULATE) {
        let graph = graph(folder);
        let read: BTreeSet<PathBuf> = graph.files().chain(graph.test_files()).map(Path::to_owned).collect();
        // A file in src/bin, and `main.rs` beside `lib.rs`, is a program of its own, which uses no module of the crate.
        let is_library = root().join(folder).join("src/lib.rs").exists();
        let is_program =
            |file: &PathBuf| file.parent().unwrap().ends_with("src/bin") || is_library && file.ends_with("src/main.rs");
        let modules = sources(folder).into_iter().filter(|file| !is_program(file));
        assert_eq!(read, modules.collect(), "the files that the graph of {folder} has (left), and all (right)");
    }
}

/// The words of source files that depend on the processor architecture.
const OF_AN_ARCHITECTURE: &[&str] =
    &["target_arch", "arch::x86_64", "arch::aarch64", "asm!(", "global_asm!(", "naked_asm!(", "EM_X86_64", "R_X86_64"];

/// Each crate has them in the modules of one folder, so that a port is a file for each.
#[test]
fn only_modules_of_architectures_know_the_processor() {
    let (mut found, mut in_modules) = (Vec::new(), 0);
    for folder in PRODUCT.iter().chain(SIMULATE) {
        for path in sources(folder) {
            let is_module = path.iter().any(|part| part == "arch");
            for (number, line) in read(&path).lines().enumerate().filter(|(_, line)| !line.trim().starts_with("//")) {
                let is_use = OF_AN_ARCHITECTURE.iter().any(|word| line.contains(word));
                match (is_use, is_module) {
                    (true, true) => in_modules += 1,
                    // The name of a foreign program's machine, for a message.
                    (true, false) if line.contains("elf::EM_X86_64 =>") => {}
                    (true, false) => found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim())),
                    (false, _) => {}
                }
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
    assert!(in_modules > 40, "{in_modules}");
}

/// Both architectures have the same names, so code that compiles for one compiles for the other.
#[test]
fn modules_of_architectures_have_the_same_names() {
    let names = |path: &Path| -> BTreeSet<String> {
        let text = read(path);
        let lines = text.lines().filter(|line| !line.starts_with([' ', '}']));
        let names = lines.filter_map(|line| {
            let item = line.strip_prefix("macro_rules! ").or_else(|| {
                let rest = line.strip_prefix("pub")?;
                let item = rest.strip_prefix(' ').or_else(|| Some(rest.split_once(") ")?.1))?;
                let item = item.trim_start_matches("unsafe ").trim_start_matches("extern \"C-unwind\" ");
                ["const ", "fn ", "struct ", "type "].iter().find_map(|kind| item.strip_prefix(kind))
            })?;
            Some(item.split(|c: char| !c.is_alphanumeric() && c != '_').next()?.to_owned())
        });
        names.collect()
    };
    let mut count = 0;
    for folder in PRODUCT.iter().chain(SIMULATE) {
        for path in sources(folder).iter().filter(|path| path.ends_with("arch/x86_64.rs")) {
            let (ours, theirs) = (names(path), names(&path.with_file_name("aarch64.rs")));
            assert!(!ours.is_empty(), "{}", path.display());
            assert_eq!(ours, theirs, "{}", path.display());
            count += 1;
        }
    }
    assert_eq!(count, 6);
}

#[test]
fn modules_use_only_what_they_may() {
    for (folder, module, not) in FORBIDDEN {
        let graph = graph(folder);
        let top = |file: &Path| {
            let inside = file.strip_prefix(folder).and_then(|file| file.strip_prefix("src")).unwrap();
            let first = inside.components().next().unwrap();
            first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned()
        };
        let modules: BTreeSet<String> = graph.files().map(top).collect();
        for name in not.iter().chain([module]) {
            assert!(modules.contains(*name), "{folder} has no module {name}");
        }
        for file in graph.files().filter(|file| top(file) == *module) {
            for (used, paths) in graph.uses_of(file) {
                assert!(!not.contains(&&*top(used)), "{} must not use {}: {paths:?}", file.display(), used.display());
            }
        }
    }
}

#[test]
fn no_files_use_each_other_in_circles() {
    let mut circles = String::new();
    for graph in PRODUCT.iter().chain(SIMULATE).map(|folder| graph(folder)) {
        for circle in graph.circles() {
            let _ = writeln!(circles, "\na circle of {} files:", circle.len());
            for file in &circle {
                for (used, paths) in graph.uses_of(file).filter(|(used, _)| circle.contains(used)) {
                    let _ = writeln!(circles, "  {} uses {}: {paths:?}", file.display(), used.display());
                }
            }
        }
    }
    assert!(circles.is_empty(), "{circles}");
}

#[test]
fn the_graph_of_a_small_crate() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write(
        "src/lib.rs",
        "mod a; mod b; mod c; mod d; mod e; #[cfg(test)] mod only_tests;
         pub use a::Reexported;
         macro_rules! local { ($name:ident) => { mod $name { use super::*; fn f() { $crate::e::item() } } } }",
    );
    // Groups, a module that a path passes through, and a re-export.
    write("src/a/mod.rs", "mod inner; pub use inner::Reexported; use crate::{b, c::{One, Two}};");
    write("src/a/inner.rs", "pub struct Reexported; mod inline { fn f() -> super::super::Other { } }");
    // An imported module, a type, a pattern, and paths in the tokens of a macro.
    write("src/b.rs", "use crate::d; fn f(x: d::Type) { assert!(matches!(x, crate::c::One | ..)); }");
    // Nothing is used: visibility, other crates, comments, strings and tests.
    write(
        "src/c.rs",
        "pub(in crate::a) struct One; pub struct Two; use std::fmt; // crate::a::X
         const TEXT: &str = \"crate::b::f\"; #[cfg(all(test, unix))] use crate::e::item;
         #[cfg(test)] mod tests { use crate::b::f; }",
    );
    write("src/d.rs", "pub struct Type; use super::Reexported;");
    write("src/e.rs", "pub fn item() {} #[cfg(any(test, unix))] fn f() { let _ = crate::b::f; }");
    write("src/only_tests.rs", "use crate::a;");
    let graph = FileGraph::read(folder.path(), Path::new("src/lib.rs"));
    let uses = |file: &str| -> Vec<String> {
        let used = graph.uses_of(Path::new(file));
        used.map(|(used, _)| used.strip_prefix("src").unwrap().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(uses("src/lib.rs"), ["a/mod.rs", "e.rs"]);
    assert_eq!(uses("src/a/mod.rs"), ["a/inner.rs", "c.rs"]);
    assert_eq!(uses("src/a/inner.rs"), ["a/mod.rs"]);
    assert_eq!(uses("src/b.rs"), ["c.rs", "d.rs"]);
    assert_eq!(uses("src/c.rs"), [""; 0]);
    assert_eq!(uses("src/d.rs"), ["lib.rs"]);
    assert_eq!(uses("src/e.rs"), ["b.rs"]);
    let circles: Vec<Vec<&str>> =
        graph.circles().iter().map(|circle| circle.iter().map(|file| file.to_str().unwrap()).collect()).collect();
    let largest = ["src/b.rs", "src/d.rs", "src/e.rs", "src/lib.rs"];
    assert_eq!(circles, [vec!["src/a/inner.rs", "src/a/mod.rs"], largest.to_vec()]);
    assert_eq!(graph.test_files().collect::<Vec<_>>(), [Path::new("src/only_tests.rs")]);
}
