//! Recognizes files that `torch.compile`'s inductor generates, by their names.

/// The length of such a name: the letter `c` and 51 digits of a SHA-256 in base 32.
const STEM: usize = 52;

/// Whether this is the name of a Python file that inductor generated, in every version from 2.1 on. An example is
/// `.../wu/cwu4x...o2.py`; the folder's name is the two digits after the first letter.
///
/// This is called for every new frame. Most names are rejected at the first byte.
pub fn is_inductor_file(filename: &str) -> bool {
    let Some((path, [b'/', stem @ .., b'.', b'p', b'y'])) = filename.as_bytes().split_last_chunk::<{ STEM + 4 }>()
    else {
        return false;
    };
    let folder = path.strip_suffix(&stem[1..3]);
    stem[0] == b'c'
        && folder.is_some_and(|parent| parent.last().is_none_or(|b| *b == b'/'))
        && stem.iter().all(|b| b.is_ascii_lowercase() || (b'2'..=b'7').contains(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_files_and_others() {
        let stem = "c2wuhq6zrg5jizv2kmbtq3m5e7xn2ydpi4ouxnmc3g7tk2cprlb3";
        assert!(is_inductor_file(&format!("/tmp/torchinductor_me/2w/{stem}.py")));
        assert!(is_inductor_file(&format!("2w/{stem}.py")));
        assert!(!is_inductor_file(&format!("/tmp/torchinductor_me/2x/{stem}.py")));
        assert!(!is_inductor_file(&format!("/tmp/torchinductor_me/2w/{stem}.cpp")));
        assert!(!is_inductor_file(&format!("{stem}.py")));
        assert!(!is_inductor_file(&format!("/2W/{}.py", stem.to_uppercase())));
        assert!(!is_inductor_file("/home/me/on/cone.py") && !is_inductor_file("é/céé.py") && !is_inductor_file(""));
    }
}
