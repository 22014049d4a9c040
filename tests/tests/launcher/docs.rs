//! `memtrace docs`: the pages are those of the repository, in the groups of its index, and help texts name no others.

use std::collections::BTreeSet;
use std::process::Command;

use memtrace_tests::traced_program::{memtrace, root};

/// The exit status of `memtrace ARGUMENTS`, and what it prints.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(memtrace()).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The names in the list of all pages.
fn listed() -> Vec<String> {
    let (status, list, _) = run(&["docs"]);
    assert_eq!(status, 0);
    let pages = list.lines().take_while(|line| *line != "JSON Schemas");
    pages.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn every_page_is_printed_as_it_is_in_the_repository() {
    let names = listed();
    assert!(names.len() > 50, "{names:?}");
    for name in names.iter().map(String::as_str).chain(["README"]) {
        let (status, page, error) = run(&["docs", name]);
        let file = std::fs::read_to_string(root().join(format!("docs/{name}.md"))).unwrap();
        assert!(status == 0 && error.is_empty() && page == file, "{name}: {status} {error}");
    }
}

/// The pages of docs/ that are for users are in the list, once each and no others.
#[test]
fn the_list_has_all_pages_for_users() {
    let mut expected = BTreeSet::new();
    for folder in ["", "how-to", "tutorials", "reference", "explanation"] {
        for entry in std::fs::read_dir(root().join("docs").join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") && !path.ends_with("docs/README.md") {
                let name = path.strip_prefix(root().join("docs")).unwrap().with_extension("");
                expected.insert(name.into_os_string().into_string().unwrap());
            }
        }
    }
    let names = listed();
    assert_eq!(names.len(), expected.len());
    assert_eq!(names.into_iter().collect::<BTreeSet<_>>(), expected);
    let (_, list, _) = run(&["docs"]);
    let index = std::fs::read_to_string(root().join("docs/README.md")).unwrap();
    let headings = index.lines().filter_map(|line| line.strip_prefix("### "));
    assert!(
        headings.clone().count() > 8 && headings.into_iter().all(|heading| list.contains(&format!("\n{heading}\n")))
    );
}

#[test]
fn an_unknown_page_is_an_error_with_names_that_are_close() {
    let (status, output, error) = run(&["docs", "out-of-memroy"]);
    assert_eq!((status, &*output), (2, ""));
    assert_eq!(
        error,
        "error: there is no page out-of-memroy\n\
         help: did you mean how-to/out-of-memory? memtrace docs lists all pages\n"
    );
    let (status, _, error) = run(&["docs", "zebra"]);
    assert!(status == 2 && error.ends_with("help: memtrace docs lists all pages\n"), "{error}");
}

/// The paths of pages and JSON Schemas in a text.
fn paths(text: &str) -> Vec<String> {
    let words =
        text.split(|c: char| c.is_whitespace() || "()`,;\"\\".contains(c)).map(|word| word.trim_end_matches('.'));
    let is_page = |word: &&str| word.starts_with("docs/") && word.ends_with(".md") || word.contains("/schema/");
    words.filter(is_page).map(str::to_owned).collect()
}

/// The paths of pages in the sources of the launcher, without its comments: those of messages.
fn named_by_messages() -> Vec<String> {
    let mut folders = vec![root().join("launcher/src")];
    let mut named = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                named.extend(code.flat_map(paths));
            }
        }
    }
    named
}

/// Every path of a page or schema in the help texts and messages of all commands is a page of the binary.
#[test]
fn help_texts_name_pages_of_the_binary() {
    let (_, help, _) = run(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"dry-run") && commands.contains(&"docs"), "{commands:?}");
    let mut named = BTreeSet::from_iter(named_by_messages());
    assert!(named.contains("docs/how-to/attach.md"), "{named:?}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        let (_, help, _) = run(&[command, "--help"]);
        named.extend(paths(&help));
    }
    assert!(named.len() > 8 && named.contains("analysis/schema/summary.schema.json"), "{named:?}");
    for path in named {
        let (status, text, _) = run(&["docs", &path]);
        let file = std::fs::read_to_string(root().join(&path)).unwrap();
        assert!(status == 0 && text == file, "{path}");
    }
}
