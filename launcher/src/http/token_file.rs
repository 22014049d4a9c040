//! Reads a token from a file that only this user can read.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, ensure};
use rustix::process::geteuid;

use super::access::Token;
use crate::message::WithHelp;

/// The length of a token in characters: a shorter one could be guessed.
const MIN_LENGTH: usize = 16;
const MAX_LENGTH: usize = 1024;
/// The mode bits of users other than the owner.
const OTHERS_MODE: u32 = 0o077;

impl Token {
    /// The token in this file. Spaces and line ends around it do not count.
    pub(crate) fn from_file(path: &Path) -> anyhow::Result<Token> {
        let shown = path.display();
        let cannot = || format!("cannot read the token in {shown}");
        // The flag keeps the open of a pipe from waiting for a writer.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).with_context(cannot)?;
        let metadata = file.metadata().with_context(cannot)?;
        ensure!(metadata.is_file(), "{}: it is not a regular file", cannot());
        ensure!(metadata.uid() == geteuid().as_raw(), "{}: it belongs to another user", cannot());
        ensure!(
            metadata.mode() & OTHERS_MODE == 0,
            WithHelp::new(format!("other users can access {shown}, which has the token"), format!("chmod 600 {shown}"))
        );
        let mut text = String::new();
        // A line end and as many spaces again may surround it.
        file.take(2 * MAX_LENGTH as u64).read_to_string(&mut text).with_context(cannot)?;
        let text = text.trim();
        let is_token = text.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(
            is_token && (MIN_LENGTH..=MAX_LENGTH).contains(&text.len()),
            WithHelp::new(
                format!("{shown} has no token: {MIN_LENGTH} to {MAX_LENGTH} characters without spaces"),
                format!("make one: (umask 077; openssl rand -hex 32 > {shown})")
            )
        );
        Ok(Token::new(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_token_comes_from_a_private_file_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let write = |content: &[u8], mode| {
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let error = || format!("{:#}", Token::from_file(&path).unwrap_err());
        write(b" 0123456789abcdef\n", 0o600);
        assert!(Token::from_file(&path).unwrap().is("0123456789abcdef"));
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(Token::from_file(&link).is_ok(), "the file counts, not the link");
        for mode in [0o604, 0o640, 0o620, 0o666] {
            write(b"0123456789abcdef", mode);
            assert!(error().starts_with("other users can access "), "{mode:o}: {}", error());
        }
        for content in [&b""[..], b"0123456789abcde", b"0123456789 abcdef", &[b'a'; 1025], &[b'a'; 1 << 20], b"\0"] {
            write(content, 0o600);
            assert!(error().contains("has no token: "), "{}", error());
        }
        write(&[0xff; 32], 0o600);
        assert!(error().starts_with("cannot read the token in "), "{}", error());
        std::fs::remove_file(&path).unwrap();
        assert!(error().contains("No such file"), "{}", error());
        assert!(format!("{:#}", Token::from_file(folder.path()).unwrap_err()).contains("not a regular file"));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(error().ends_with("it is not a regular file"), "{}", error());
    }
}
