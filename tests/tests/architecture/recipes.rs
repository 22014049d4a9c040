//! The recipes of CONTRIBUTING.md are complete: what exists was added as they say, in the files that they name and in
//! no other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{PRODUCT, read, sources};
use memtrace_tests::traced_program::root;

/// The rules of a list such as `analysis/insight/src/diagnostics/list.rs`: for each module, the ids.
fn rules(list: &str) -> BTreeMap<String, Vec<String>> {
    let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut module = String::new();
    for line in read(Path::new(list)).lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if let Some(head) = line.strip_suffix(" {") {
            let name = head.split(':').next().unwrap_or_default();
            if name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') {
                module = name.to_owned();
            }
        } else if let Some((id, _)) = line.strip_suffix("\",").and_then(|line| line.split_once(" = \"")) {
            let id = id.rsplit(": ").next().unwrap_or(id);
            rules.entry(module.clone()).or_default().push(id.to_owned());
        }
    }
    rules
}

/// The product's source files, each with its text without tests.
fn product() -> Vec<(PathBuf, String)> {
    let files = PRODUCT.iter().flat_map(|folder| sources(folder));
    let is_test = |file: &PathBuf| file.file_stem().is_some_and(|stem| stem == "tests" || stem == "test_program");
    let without_tests = |text: String| text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
    files.filter(|file| !is_test(file)).map(|file| (file.clone(), without_tests(read(&file)))).collect()
}

/// The product's source files that name `name` as a whole word.
fn files_that_name<'a>(product: &'a [(PathBuf, String)], name: &str) -> impl Iterator<Item = &'a Path> {
    let is_named = move |source: &str| {
        let ends = |at: usize| !source[at + name.len()..].starts_with(|c: char| c.is_alphanumeric());
        source.match_indices(name).any(|(at, _)| ends(at))
    };
    product.iter().filter(move |(_, source)| is_named(source)).map(|(file, _)| file.as_path())
}

/// Requires that the rules of a folder's list are named in the folder only, apart from the exceptions. `is_known`
/// permits files of the folder itself to name the rule of another module.
fn rules_have_one_file(folder: &str, is_known: bool, exceptions: &[(&str, &str)]) {
    let product = product();
    let list = PathBuf::from(format!("{folder}/list.rs"));
    let rules = rules(list.to_str().unwrap());
    assert!(rules.len() > 9, "{folder}: {} modules", rules.len());
    let mut found = BTreeSet::new();
    for (module, ids) in &rules {
        let own = [format!("{folder}/{module}.rs"), format!("{folder}/{module}/")];
        assert!(own.iter().any(|path| root().join(path).exists()), "{folder} has no {module}");
        let is_own = |file: &Path| own.iter().any(|path| file.starts_with(path)) || file == list;
        for id in ids {
            let name = format!("RuleId::{id}");
            let others =
                files_that_name(&product, &name).filter(|file| !(is_own(file) || is_known && file.starts_with(folder)));
            found.extend(others.map(|file| (id.clone(), file.display().to_string())));
        }
    }
    let expected: BTreeSet<(String, String)> =
        exceptions.iter().map(|(id, file)| ((*id).to_owned(), (*file).to_owned())).collect();
    assert_eq!(found, expected, "rules that other files name (left), and those that may (right)");
}

#[test]
fn a_diagnostic_has_one_file_and_an_entry_in_the_list() {
    // `check --max-leak` names the line of a leak. Servers cannot have some issues.
    let of_servers = ["EvalWithoutNoGrad", "GraphKept", "GraphRetained", "Leak", "OutputsKept"];
    let of_servers = of_servers.map(|id| (id, "analysis/insight/src/passes/serving.rs"));
    let leaks = ["GraphKept", "Leak"].map(|id| (id, "analysis/summary/src/check.rs"));
    let exceptions: Vec<_> = leaks.into_iter().chain(of_servers).collect();
    rules_have_one_file("analysis/insight/src/diagnostics", false, &exceptions);
}

#[test]
fn a_suggestion_has_one_file_and_an_entry_in_the_list() {
    // Suggestions name those that they exclude. Frameworks have settings for some of them.
    let settings = ["Autocast", "CheckpointLayers", "CheckpointOrNoGrad", "HalfTheBatch", "MoreMicroBatches"];
    let settings = settings.into_iter().chain(["ScaledDotProductAttention", "SmallerBatches"]);
    let exceptions = settings.map(|id| (id, "analysis/insight/src/rules/frameworks.rs"));
    // The replay of freezing shows what this issue costs.
    let freezing = ("FreezeUnused", "analysis/insight/src/diagnostics/gradients.rs");
    let exceptions: Vec<_> = exceptions.chain([freezing]).collect();
    rules_have_one_file("analysis/insight/src/suggestions", true, &exceptions);
}

#[test]
fn an_export_has_one_file_and_its_places_in_the_launcher() {
    let product = product();
    let (_, cli) = product.iter().find(|(file, _)| file.ends_with("launcher/src/cli.rs")).unwrap();
    let body = cli.split_once("enum ExportFormat {").unwrap().1.split_once("\n}").unwrap().0;
    let variants: Vec<&str> = body
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("//"))
        .filter_map(|line| line.strip_suffix(','))
        .collect();
    assert!(variants.len() > 7, "{variants:?}");
    for variant in variants {
        let name = format!("ExportFormat::{variant}");
        let commands = ["launcher/src/commands/export.rs", "launcher/src/commands/snapshot/mod.rs"].map(Path::new);
        let others: Vec<&Path> = files_that_name(&product, &name).filter(|file| !commands.contains(file)).collect();
        assert_eq!(others, [""; 0].map(Path::new), "{variant}");
    }
}

#[test]
fn the_files_that_recipes_name_exist() {
    let text = read(Path::new("CONTRIBUTING.md"));
    let words = text.split('`').skip(1).step_by(2).filter_map(|code| code.split_whitespace().next());
    let is_path = |word: &&str| {
        word.contains('/') && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c))
    };
    let paths: BTreeSet<&str> = words.filter(is_path).collect();
    assert!(paths.len() > 20, "{paths:?}");
    let missing: Vec<&&str> = paths.iter().filter(|path| !root().join(path).exists()).collect();
    assert!(missing.is_empty(), "CONTRIBUTING.md names {missing:?}");
}

/// The long options that `launcher/src/cli.rs` declares and help lists, each with the name of its field.
fn long_options(cli: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut lines = cli.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let Some(arguments) = line.strip_prefix("#[arg(").or_else(|| line.strip_prefix("#[command(")) else { continue };
        let is_long = arguments.split(['(', ')', ',', ']']).map(str::trim).any(|word| word.starts_with("long"));
        if !is_long || arguments.contains("hide = true") {
            continue;
        }
        let field = lines.find_map(|line| line.strip_prefix("pub(crate) ")?.split_once(':').map(|(name, _)| name));
        let field = field.expect("a field after its attribute").to_owned();
        let named = arguments.split_once("long = \"").map(|(_, rest)| rest.split('"').next().unwrap().to_owned());
        found.push((named.unwrap_or_else(|| field.replace('_', "-")), field));
    }
    found
}

/// The rows of `library_options!` in `trace/src/options.rs`.
fn library_options() -> Vec<String> {
    let text = read(Path::new("trace/src/options.rs"));
    let table = text.split_once("\nlibrary_options! {").unwrap().1.split_once("\n}").unwrap().0;
    let row = |line: &str| {
        line.trim().split_once(": ").filter(|_| !line.trim().starts_with("//")).map(|(name, _)| name.to_owned())
    };
    table.lines().filter_map(row).collect()
}

#[test]
fn a_command_line_option_has_one_file_and_a_row_of_the_library() {
    let cli = read(Path::new("launcher/src/cli.rs"));
    let options = long_options(&cli);
    assert!(options.len() > 60, "{options:?}");
    let page = read(Path::new("docs/reference/command-line.md"));
    let missing: Vec<&str> =
        options.iter().map(|(name, _)| name.as_str()).filter(|name| !page.contains(&format!("`--{name}"))).collect();
    assert_eq!(missing, [""; 0], "options that docs/reference/command-line.md does not list");

    let rows = library_options();
    assert!(rows.len() > 8, "{rows:?}");
    let product = product();
    let launcher: Vec<_> = product.iter().filter(|(file, _)| file.starts_with("launcher")).cloned().collect();
    // Of the limit, run.json has a copy; JAX's pools are switched off by variables of its environment.
    let exceptions = [("limit", "launcher/src/commands/run.rs"), ("pools", "launcher/src/xla.rs")];
    let exceptions = BTreeSet::from(exceptions.map(|(field, file)| (field, Path::new(file))));
    let of_library = options.iter().filter(|(_, field)| rows.contains(field));
    let mut found = BTreeSet::new();
    let mut passed = 0;
    for (_, field) in of_library {
        for name in [format!("run.{field}"), format!("recording.{field}")] {
            for file in files_that_name(&launcher, &name) {
                if file.ends_with("commands/library_options.rs") {
                    passed += 1;
                } else {
                    found.insert((field.as_str(), file));
                }
            }
        }
    }
    assert_eq!(found, exceptions, "options of the library that other files pass (left), and those that may (right)");
    assert!(passed > 4, "{passed} options are passed to the library");
}
