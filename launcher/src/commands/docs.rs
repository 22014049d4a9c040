//! `memtrace docs`: the pages of the documentation and the JSON Schemas, which are inside the binary.

use std::fmt::Write;

use anyhow::bail;

use super::similar_names::did_you_mean;
use crate::cli;
use crate::message::WithHelp;
use crate::output::Printed;

// The name and the text of each page, `PAGES`, and of each schema, `SCHEMAS`.
include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// The page that lists the others, in groups.
const INDEX: &str = "README";
/// The heading of the index below which the pages are not for users, and not in the binary.
const FOR_DEVELOPERS: &str = "For developers";

/// A page, as the index lists it.
#[derive(Debug, PartialEq)]
struct Listed {
    group: String,
    name: &'static str,
    title: String,
}

/// Prints a page, or the list of all pages.
pub(crate) fn docs(options: &cli::Docs) -> anyhow::Result<()> {
    let text = match &options.page {
        Some(name) => match schema(name) {
            Some(text) => text.to_owned(),
            None => text_of(find(name)?).unwrap_or_default().to_owned(),
        },
        None => list(),
    };
    super::write_output(Printed::File(text.as_bytes()), None)
}

pub(super) fn text_of(name: &str) -> Option<&'static str> {
    PAGES.iter().find(|(page, _)| *page == name).map(|(_, text)| *text)
}

/// The JSON Schema of this file name, with or without folders.
fn schema(given: &str) -> Option<&'static str> {
    SCHEMAS.iter().find(|(name, _)| *name == last(given)).map(|(_, text)| *text)
}

/// The pages of the index, in its order. A page counts where it is listed first.
fn listed() -> Vec<Listed> {
    let mut pages: Vec<Listed> = Vec::new();
    let mut group = String::new();
    for line in text_of(INDEX).unwrap_or_default().lines() {
        if let Some(heading) = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with("##")) {
            group = heading.to_owned();
        }
        if group == FOR_DEVELOPERS {
            break;
        }
        if !line.starts_with("- ") && !line.starts_with("  ") {
            continue;
        }
        for (before, after) in line.match_indices("](").map(|(at, _)| line.split_at(at)) {
            let title = before.rsplit('[').next().unwrap_or_default();
            let link = after.trim_start_matches("](").split([')', '#']).next().unwrap_or_default();
            let page = PAGES.iter().map(|(name, _)| *name).find(|name| link.strip_suffix(".md") == Some(name));
            let Some(name) = page.filter(|name| pages.iter().all(|page| page.name != *name)) else { continue };
            pages.push(Listed { group: group.clone(), name, title: title.replace('`', "") });
        }
    }
    pages
}

/// The list of all pages, in the groups of the index.
fn list() -> String {
    let pages = listed();
    let width = pages.iter().map(|page| page.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    let mut group = None;
    for page in &pages {
        if group != Some(&page.group) {
            let _ = writeln!(text, "{}{}", if group.is_some() { "\n" } else { "" }, page.group);
            group = Some(&page.group);
        }
        let _ = writeln!(text, "  {:width$}  {}", page.name, page.title);
    }
    let schemas: Vec<&str> = SCHEMAS.iter().map(|(name, _)| *name).collect();
    let _ = writeln!(text, "\nJSON Schemas\n  {}", schemas.join("\n  "));
    text.push_str("\nmemtrace docs PAGE prints a page: memtrace docs out-of-memory\n");
    text
}

/// The name of the page for the name that the user gave: `how-to/limit`, `limit`, or the path `docs/how-to/limit.md`.
/// If several folders have a page of this name, it is the first in the index: a guide before its reference.
fn find(given: &str) -> anyhow::Result<&'static str> {
    let requested = given.trim_start_matches("docs/").trim_end_matches(".md").trim_end_matches('/').to_lowercase();
    if requested == INDEX.to_lowercase() {
        return Ok(INDEX);
    }
    let pages: Vec<&'static str> = listed().iter().map(|page| page.name).collect();
    let found =
        pages.iter().find(|name| **name == requested).or_else(|| pages.iter().find(|name| last(name) == requested));
    if let Some(name) = found {
        return Ok(name);
    }
    let help = did_you_mean(&requested, pages.into_iter(), last, "memtrace docs lists all pages");
    bail!(WithHelp::new(format!("there is no page {given}"), help))
}

/// The name of a page without its folder.
fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(given: &str) -> String {
        find(given).map_or_else(|error| format!("{error:#}"), str::to_owned)
    }

    #[test]
    fn a_page_has_three_names() {
        for given in ["how-to/limit", "limit", "docs/how-to/limit.md", "Limit"] {
            assert_eq!(name(given), "how-to/limit", "{given}");
        }
        assert_eq!(name("dry-run"), "how-to/dry-run", "the guide comes before the reference");
        assert_eq!(name("reference/dry-run"), "reference/dry-run");
        assert_eq!(name("README"), INDEX);
    }

    #[test]
    fn every_page_is_in_a_group_of_the_list() {
        let pages = listed();
        let names: Vec<&str> = pages.iter().map(|page| page.name).collect();
        for (page, text) in PAGES {
            assert!(page == INDEX || names.contains(&page), "{page} is not in the list");
            assert!(text.starts_with("# "), "{page}");
        }
        assert!(pages.iter().all(|page| !page.group.is_empty() && !page.title.is_empty()), "{pages:?}");
    }
}
