//! Reads what other processes write: up to a size, and from a pipe up to a point in time.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use crate::epoll::Epoll;

/// The first `limit` bytes of a file.
///
/// # Errors
///
/// Those of the system.
pub(crate) fn read_limited(path: &(impl AsRef<Path> + ?Sized), limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All that `input`, a pipe, has until its end.
///
/// # Errors
///
/// If the end has not come at the time `end`, if there are more than `most` bytes, and those of the system.
pub(crate) fn read_until(mut input: impl Read + AsFd, end: Instant, most: usize) -> io::Result<Vec<u8>> {
    let epoll = Epoll::new()?;
    epoll.add(input.as_fd(), 0)?;
    let (mut read, mut ready, mut buffer) = (Vec::new(), Vec::new(), [0; 4096]);
    loop {
        let left = end.checked_duration_since(Instant::now()).ok_or(ErrorKind::TimedOut)?;
        epoll.wait(Some(left), &mut ready);
        if ready.is_empty() {
            continue;
        }
        match input.read(&mut buffer)? {
            0 => return Ok(read),
            bytes if read.len() + bytes > most => return Err(ErrorKind::FileTooLarge.into()),
            bytes => read.extend_from_slice(&buffer[..bytes]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::time::Duration;

    fn pipe() -> (File, File) {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        (reader.into(), writer.into())
    }

    #[test]
    fn output_has_a_bound_and_a_time_limit() {
        let later = || Instant::now() + Duration::from_secs(600);
        let (reader, mut writer) = pipe();
        writer.write_all(&[7; 10_000]).unwrap();
        assert_eq!(read_until(&reader, later(), 9999).unwrap_err().kind(), ErrorKind::FileTooLarge);
        let (reader, mut writer) = pipe();
        writer.write_all(&[7; 10_000]).unwrap();
        assert_eq!(read_until(&reader, Instant::now(), 20_000).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(writer);
        assert_eq!(read_until(&reader, later(), 10_000).unwrap(), [7; 10_000]);
    }
}
