//! Words and packages that everybody knows. A redacted recording keeps them.

use std::collections::HashSet;
use std::sync::LazyLock;

static PACKAGES: LazyLock<HashSet<&str>> = LazyLock::new(|| names(include_str!("public_packages.txt")));
static WORDS: LazyLock<HashSet<&str>> = LazyLock::new(|| names(include_str!("public_words.txt")));

/// The names of a list. Lines that begin with `#` are comments.
fn names(list: &'static str) -> HashSet<&'static str> {
    list.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace).collect()
}

/// Whether a file belongs to a public package or to Python.
pub(super) fn is_public_file(filename: &str) -> bool {
    let package = |packages: &str| {
        let inside = &filename[filename.rfind(packages)? + packages.len()..];
        let package = inside.split('/').next()?;
        Some(is_package(package.split(['.', '-']).next()?))
    };
    match package("site-packages/").or_else(|| package("dist-packages/")) {
        Some(is_public) => is_public,
        None => {
            let python = ["/lib/python3", "/lib64/python3"].iter().any(|library| filename.contains(library));
            python || filename.starts_with("torch/") || filename.starts_with("<frozen ")
        }
    }
}

/// Whether a library belongs to a public package or to the system: its path stays as far as it says so.
pub(super) fn is_known_object(path: &str) -> bool {
    is_public_file(path) || path.starts_with("/usr/") || path.starts_with("/lib")
}

/// Whether this is the name of a public package.
pub(super) fn is_package(name: &str) -> bool {
    PACKAGES.contains(name)
}

/// Whether everybody knows this word: one of the list, `__init__` and the like, or a word without a letter.
pub(super) fn is_word(word: &str) -> bool {
    let is_special = word.len() > 4 && word.starts_with("__") && word.ends_with("__");
    is_special || !word.chars().any(char::is_alphabetic) || WORDS.contains(word)
}

/// Programs that start others. Their names stay on a command line.
pub(super) fn is_program(name: &str) -> bool {
    let known = ["accelerate", "bash", "deepspeed", "env", "ipython", "mpirun", "pytest", "sh", "srun", "torchrun"];
    let version = name.strip_prefix("python").unwrap_or("-");
    known.contains(&name) || version.chars().all(|c| c.is_ascii_digit() || c == '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_known_or_not() {
        for word in ["forward", "__init__", "Linear", "0", "17", "exp_avg_sq", "[]"] {
            assert!(is_word(word), "{word}");
        }
        for word in ["ForwardModel", "__secret", "secret__", "linear_project", "____"] {
            assert_eq!(is_word(word), word == "____", "{word}");
        }
        assert!(is_program("python3.12") && is_program("python") && !is_program("pythonista") && !is_program("train"));
        assert!(is_package("torch") && !is_package("torch_secret"));
    }
}
