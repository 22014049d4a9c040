//! Identifies a PyTorch by its files. Nothing is imported.

use std::path::Path;

use memtrace_trace::file::untrusted;

use super::report::PyTorch;
use super::tested;

/// The maximum size of `version.py` in bytes. The file has a few lines.
const MAX_FILE_SIZE: u64 = 64 * 1024;

/// The PyTorch in this folder. `None` when it has no readable `version.py`.
pub(super) fn in_folder(folder: &Path) -> Option<PyTorch> {
    // The recorded program may have named the folder.
    let file = untrusted::open(&folder.join("version.py")).ok()?;
    let text = String::from_utf8(untrusted::read(&file, MAX_FILE_SIZE).ok()?).ok()?;
    let version = assigned(&text, "__version__")?;
    let cuda = assigned(&text, "cuda");
    let tested = tested::pytorch(&version, cuda.as_deref());
    Some(PyTorch { version, cuda, path: folder.display().to_string(), tested })
}

/// The PyTorch that contains a file such as `.../torch/lib/libc10.so` or `.../torch/nn/modules/linear.py`.
pub(super) fn of_file(path: &Path) -> Option<PyTorch> {
    path.ancestors().filter(|a| a.file_name().is_some_and(|n| n == "torch")).find_map(in_folder)
}

/// The string that a line of Python assigns to a name: `name = '...'`, `name: Optional[str] = '...'`.
fn assigned(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = rest.strip_prefix(':').map_or(Some(rest), |r| r.split_once('=').map(|(_, value)| value));
        let value = rest?.trim_start().trim_start_matches('=').trim();
        let quote = value.chars().next().filter(|c| *c == '\'' || *c == '"')?;
        let inner = value.strip_prefix(quote)?;
        Some(inner.split(quote).next()?.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_found_from_any_of_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let torch = dir.path().join("site-packages/torch");
        std::fs::create_dir_all(&torch).unwrap();
        std::fs::write(torch.join("version.py"), "__version__ = '2.11.0'\ncuda = '13.0'\n").unwrap();
        for file in ["lib/libc10_cuda.so", "nn/modules/linear.py"] {
            assert_eq!(of_file(&torch.join(file)).unwrap().version, "2.11.0");
        }
        assert_eq!(of_file(&dir.path().join("site-packages/numpy/torch/lib/x.so")), None);
    }

    #[test]
    fn version_files_of_old_and_new_releases() {
        let new = "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n\
                   __version__ = '2.11.0+cu130'\n\
                   debug = False\ncuda: Optional[str] = '13.0'\ngit_version = 'abc'\n";
        assert_eq!(assigned(new, "__version__").as_deref(), Some("2.11.0+cu130"));
        assert_eq!(assigned(new, "cuda").as_deref(), Some("13.0"));
        let cpu = "__version__ = \"2.1.2\"\ncuda = None\n";
        assert_eq!((assigned(cpu, "__version__").as_deref(), assigned(cpu, "cuda")), (Some("2.1.2"), None));
        assert_eq!(assigned("", "cuda"), None);
    }
}
