//! The recipe "Add a hooked function" of CONTRIBUTING.md names every file that knows a hooked function.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use memtrace_trace::api::{Api, MemoryKind};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{PRODUCT, read, root, sources};

/// The hooked functions that the simulated CUDA lacks, so that no test program calls them. None is added.
const NOT_SIMULATED: [&str; 10] = [
    "cuModuleLoadFatBinary",
    "cuLibraryLoadFromFile",
    "cuStreamBeginCapture_v2_ptsz",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginCaptureToGraph_ptsz",
    "cuStreamEndCapture_ptsz",
    "cuGraphInstantiate_v2",
    "cuGraphInstantiateWithParams",
    "cuGraphInstantiateWithParams_ptsz",
    "cuGraphUpload_ptsz",
];

/// A file that knows one function: it recreates the calls that an allocator has made before the recording.
const RECREATING: (Option<&str>, &str) = (Some("interpose/src/attach/prior_state.rs"), "cudaMalloc");

fn symbols() -> impl Iterator<Item = &'static str> {
    Api::ALL.iter().filter_map(|api| api.symbol())
}

/// The files and folders that a section of CONTRIBUTING.md names.
fn files_of_recipe(title: &str) -> BTreeSet<PathBuf> {
    let text = read(Path::new("CONTRIBUTING.md"));
    let (_, section) = text.split_once(&format!("\n## {title}\n")).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let in_backticks = section.split('`').skip(1).step_by(2);
    in_backticks.map(PathBuf::from).filter(|path| root().join(path).exists()).collect()
}

/// Adds the identifiers of the product's code: neither comments, nor texts, nor what follows `#[cfg(test)]`.
fn add_identifiers(tokens: TokenStream, found: &mut BTreeSet<String>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(ident) => _ = found.insert(ident.to_string()),
            TokenTree::Group(group) if group.stream().to_string().replace(' ', "") == "cfg(test)" => {
                let is_end = |token: &TokenTree| match token {
                    TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                    TokenTree::Punct(punct) => punct.as_char() == ';',
                    _ => false,
                };
                let _ = tokens.by_ref().find(is_end);
            }
            TokenTree::Group(group) => add_identifiers(group.stream(), found),
            _ => {}
        }
    }
}

fn identifiers(file: &Path) -> BTreeSet<String> {
    let tokens: TokenStream = read(file).parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut found = BTreeSet::new();
    add_identifiers(tokens, &mut found);
    found
}

#[test]
fn only_the_files_of_the_recipe_know_a_hooked_function() {
    let recipe = files_of_recipe("Add a hooked function");
    let known: BTreeSet<&str> = symbols().collect();
    let mut knowing = BTreeSet::new();
    for file in PRODUCT.iter().flat_map(|folder| sources(folder)) {
        let mut names = identifiers(&file);
        names.retain(|name| known.contains(name.as_str()) && (file.to_str(), name.as_str()) != RECREATING);
        assert!(names.is_empty() || recipe.contains(&file), "{} knows {names:?}", file.display());
        if !names.is_empty() {
            knowing.insert(file);
        }
    }
    let in_product = |file: &&PathBuf| PRODUCT.iter().any(|folder| file.starts_with(Path::new(folder).join("src")));
    assert_eq!(recipe.iter().filter(in_product).cloned().collect::<BTreeSet<_>>(), knowing);
}

#[test]
fn each_hooked_function_is_declared_documented_and_simulated() {
    let functions = identifiers(Path::new("interpose/src/cuda/functions.rs"));
    let format = read(Path::new("trace/FORMAT.md"));
    let simulated: BTreeSet<String> = ["simulate/driver", "simulate/runtime"]
        .iter()
        .flat_map(|folder| sources(folder))
        .flat_map(|file| identifiers(&file))
        .collect();
    for api in Api::ALL {
        let symbol = api.symbol().expect("a known function");
        assert!(functions.contains(symbol), "{symbol} has no declaration");
        let (effect, action) = api.effect().zip(api.action()).expect("a known function");
        let memory = api.memory_kind().map_or("-", MemoryKind::name);
        let row = format!("\n| {} | `{symbol}` | {} | {memory} | {} |\n", api.0, effect.name(), action.name());
        assert!(format.contains(&row), "trace/FORMAT.md lacks {row}");
    }
    assert_eq!(symbols().filter(|symbol| !simulated.contains(*symbol)).collect::<Vec<_>>(), NOT_SIMULATED);
}

#[test]
fn identifiers_are_those_of_code() {
    let code = "fn f() { m! { inside } } // comment\n const TEXT: &str = \"text\";
                #[cfg(test)] mod tests { test } struct Last;";
    let mut found = BTreeSet::new();
    add_identifiers(code.parse().unwrap(), &mut found);
    let found: Vec<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(found, ["Last", "TEXT", "const", "f", "fn", "inside", "m", "str", "struct"]);
}
