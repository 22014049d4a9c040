//! A client of HTTP that sends what the test says.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

/// An answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends a request as it is, to an IP address with a port or to `unix:PATH`. `None` if there is no whole answer.
pub(crate) fn exchange(address: &str, request: &str) -> Option<Answer> {
    match address.strip_prefix("unix:") {
        Some(path) => over(UnixStream::connect(path).ok()?, request),
        None => over(TcpStream::connect(address).ok()?, request),
    }
}

fn over(mut stream: impl Read + Write, request: &str) -> Option<Answer> {
    // The server may answer, and close the connection, before it has read everything.
    let _ = stream.write_all(request.as_bytes());
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")?.parse::<usize>().ok())?;
    let is_whole = body.len() == length || head.contains(" HEAD");
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let (head, body) = (head.to_owned(), body.to_owned());
    (is_whole || body.is_empty()).then_some(Answer { status, head, body })
}
