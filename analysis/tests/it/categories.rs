//! `Category` is the one table of categories: pages have files that are generated from it, the reference lists the
//! same, and no other file needs a line for a new category.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it categories` rewrites the generated files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use memtrace_analysis::passes::Category;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn pages_have_the_colors() {
    let rule = |selector: &str, color: fn(Category) -> u32| {
        let line = |one: Category| format!("  --category-{}: #{:06x};\n", one.name(), color(one));
        format!("{selector} {{\n{}}}\n", Category::STACKED.map(line).concat())
    };
    let css = format!(
        "/* The colors of categories. Generated: see analysis/tests/it/categories.rs. */\n{}{}",
        rule(":root", Category::light_color),
        rule(":root[data-theme='dark']", Category::dark_color)
    );
    crate::golden::assert_matches("../../../web/src/categories.css", &css);
}

#[test]
fn pages_have_the_order_and_the_names() {
    let names: String = Category::STACKED.iter().map(|one| format!("  '{}',\n", one.name())).collect();
    let texts: String =
        Category::STACKED.iter().map(|one| format!("  {}: '{}',\n", one.name(), one.plural())).collect();
    let text = format!(
        "/** All categories, from the bottom of charts to the top. Generated: see \
         analysis/tests/it/categories.rs. */\n\n\
         import type {{ Category }} from './schema';\n\n\
         export const CATEGORIES: readonly Category[] = [\n{names}];\n\n\
         /** The names of categories in reports. */\n\
         export const CATEGORY_TEXTS: Readonly<Record<Category, string>> = {{\n{texts}}};\n"
    );
    crate::golden::assert_matches("../../../web/src/data/categories.ts", &text);
}

#[test]
fn the_reference_lists_all() {
    let rows: Vec<String> =
        Category::ALL.iter().map(|one| format!("| `{}` | {} |", one.name(), one.plural())).collect();
    let page = read("docs/reference/categories.md");
    let table = page.split_once("| In JSON | In reports | Meaning |").unwrap().1.split_once("\n\n").unwrap().0;
    let listed: Vec<&str> = table.lines().skip(2).collect();
    assert_eq!(listed.len(), rows.len(), "the table of docs/reference/categories.md");
    for (line, row) in listed.iter().zip(&rows) {
        assert!(line.starts_with(row), "docs/reference/categories.md has `{line}` for `{row}`");
    }
    let names: Vec<String> = Category::ALL.iter().map(|one| format!("`{}`", one.name())).collect();
    let row = format!("| `category` | text | {} |", names.join(", "));
    assert!(read("docs/reference/parquet.md").contains(&row), "docs/reference/parquet.md lacks the row {row}");
}

/// Whether a text has a category as a name in code: in quotes, as a variable of a style sheet, or as a variant.
fn names(text: &str, category: Category) -> bool {
    let name = category.name();
    let quoted = ['"', '\'', '`'].into_iter().any(|quote| text.contains(&format!("{quote}{name}{quote}")));
    quoted || text.contains(&format!("--category-{name}:")) || text.contains(&format!("Category::{category:?}"))
}

/// Adds the files below a folder that name more than three quarters of all categories.
fn find_lists(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let is_built = name == "target" || name == "node_modules" || name == "dist";
        if name.as_encoded_bytes().starts_with(b".") || is_built {
            continue;
        }
        if entry.file_type().unwrap().is_dir() {
            find_lists(&path, found);
        } else if let Ok(text) = fs::read_to_string(&path)
            && 4 * Category::ALL.iter().filter(|one| names(&text, **one)).count() > 3 * Category::ALL.len()
        {
            found.insert(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
        }
    }
}

/// A file that lists categories needs a line for a new one, so the recipe must name it.
#[test]
fn the_recipe_names_every_list_of_categories() {
    let mut found = BTreeSet::new();
    for folder in
        ["analysis", "benches", "docs", "examples", "interpose", "launcher", "scripts", "tests", "trace", "web"]
    {
        find_lists(&root().join(folder), &mut found);
    }
    let contributing = read("CONTRIBUTING.md");
    let recipe = contributing.split_once("\n## Add a category\n").unwrap().1.split("\n## ").next().unwrap();
    let named: Vec<&str> = recipe.split('`').skip(1).step_by(2).filter(|text| root().join(text).exists()).collect();
    for path in &found {
        let is_named = named.iter().any(|one| path == one || one.ends_with('/') && path.starts_with(one));
        assert!(is_named, "{path} lists categories, and the recipe in CONTRIBUTING.md does not name it");
    }
    let generated =
        ["web/src/categories.css", "web/src/data/categories.ts", "analysis/insight/src/passes/category/table.rs"];
    for path in generated {
        assert!(found.contains(path), "the search does not find {path}");
    }
}
