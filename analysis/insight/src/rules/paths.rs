//! Parts of the paths of source files, so that site-packages can be anywhere.

/// Whether the path is `end`, or ends with it after a folder.
pub(super) fn ends_with(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

/// Whether the path begins with `folder`, or contains it after another folder.
pub(super) fn is_in(path: &str, folder: &str) -> bool {
    path.match_indices(folder).any(|(at, _)| at == 0 || path.as_bytes()[at - 1] == b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_begin_after_a_folder() {
        assert!(ends_with("/x/torch/nn/module.py", "torch/nn/module.py") && ends_with("a/b.py", "a/b.py"));
        assert!(!ends_with("/x/mytorch/nn/module.py", "torch/nn/module.py"));
        assert!(is_in("vllm/lora/a.py", "vllm/lora/") && is_in("/myvllm/lora/vllm/lora/a.py", "vllm/lora/"));
        assert!(!is_in("/x/myvllm/lora/a.py", "vllm/lora/"));
    }
}
