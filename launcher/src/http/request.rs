//! Reads the head of a request. The client may be anyone.

use httparse::{EMPTY_HEADER, Status};

/// The maximum length of a head in bytes.
pub(crate) const MAX_HEAD: usize = 8 << 10;
/// The maximum number of headers.
const MAX_HEADERS: usize = 64;

/// A request without a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// `GET`, `HEAD`, ...
    pub(crate) method: String,
    /// The path with its query, as the client wrote it.
    pub(crate) target: String,
    /// The values of all `Host` headers.
    pub(crate) hosts: Vec<String>,
    /// The value of the only `Authorization` header.
    pub(crate) authorization: Option<String>,
    /// The value of the first `Accept` header.
    pub(crate) accept: Option<String>,
}

impl Request {
    /// The path and the query.
    pub(crate) fn path_and_query(&self) -> (&str, &str) {
        self.target.split_once('?').unwrap_or((&self.target, ""))
    }
}

/// Whether a body follows the head.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Content {
    /// None follows.
    None,
    /// A body follows.
    Body,
    /// The head says contradictory things about it.
    Malformed,
}

/// The bytes that a client has sent so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Head {
    /// More bytes must follow.
    Incomplete,
    /// The head of a request.
    Complete(Request, Content),
    /// This is no request.
    Malformed,
    /// The head is too long, or has too many headers.
    TooLarge,
}

impl Head {
    /// Reads the beginning of what a client sends, at most [`MAX_HEAD`] bytes of it.
    pub(crate) fn read(bytes: &[u8]) -> Head {
        let is_full = bytes.len() >= MAX_HEAD;
        let bytes = bytes.get(..MAX_HEAD).unwrap_or(bytes);
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(bytes) {
            Ok(Status::Complete(_)) => {}
            Ok(Status::Partial) if is_full => return Head::TooLarge,
            Ok(Status::Partial) => return Head::Incomplete,
            Err(httparse::Error::TooManyHeaders) => return Head::TooLarge,
            Err(_) => return Head::Malformed,
        }
        let (Some(method), Some(target)) = (parsed.method, parsed.path) else { return Head::Malformed };
        let mut request = Request {
            method: method.to_owned(),
            target: target.to_owned(),
            hosts: Vec::new(),
            authorization: None,
            accept: None,
        };
        let (mut length, mut authorizations) = (None, 0);
        let mut content = Content::None;
        for header in parsed.headers.iter() {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            // Bytes that are no text equal no expected text.
            let value = || String::from_utf8_lossy(header.value).trim().to_owned();
            if is("Host") {
                request.hosts.push(value());
            } else if is("Authorization") {
                authorizations += 1;
                request.authorization = Some(value()).filter(|_| authorizations == 1);
            } else if is("Accept") {
                request.accept.get_or_insert_with(value);
            } else if is("Transfer-Encoding") {
                content = content.max(Content::Body);
            } else if is("Content-Length") {
                let digits = value();
                let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                // Any number of digits is a length.
                let digits = digits.trim_start_matches('0').to_owned();
                let is_new = length.get_or_insert_with(|| digits.clone()) != &digits;
                content = content.max(match digits.is_empty() {
                    _ if !is_number || is_new => Content::Malformed,
                    true => Content::None,
                    false => Content::Body,
                });
            }
        }
        Head::Complete(request, content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(target: &str, hosts: &[&str]) -> Request {
        Request {
            method: "GET".to_owned(),
            target: target.to_owned(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            authorization: None,
            accept: None,
        }
    }

    #[test]
    fn a_head_is_read_however_it_arrives() {
        let head = b"GET /a?b HTTP/1.1\r\nhOST: x:1\r\nAccept: a\r\naccept: b\r\nAuthorization: Bearer 7\r\n\r\n";
        let read = Request {
            authorization: Some("Bearer 7".to_owned()),
            accept: Some("a".to_owned()),
            ..request("/a?b", &["x:1"])
        };
        for end in 0..head.len() {
            assert_eq!(Head::read(&head[..end]), Head::Incomplete, "{end} bytes");
        }
        assert_eq!(read.path_and_query(), ("/a", "b"));
        assert_eq!(Head::read(head), Head::Complete(read, Content::None));
        assert_eq!(Head::read(b"GET / HTTP/1.0\n\n"), Head::Complete(request("/", &[]), Content::None));
        let two = b"GET / HTTP/1.1\r\nHost: a\r\nHost: \xff\r\nAuthorization: a\r\nAuthorization: a\r\n\r\n";
        assert_eq!(Head::read(two), Head::Complete(request("/", &["a", "\u{fffd}"]), Content::None));
    }

    #[test]
    fn a_body_is_noticed() {
        let content = |headers: &str| match Head::read(format!("GET / HTTP/1.1\r\n{headers}\r\n").as_bytes()) {
            Head::Complete(_, content) => content,
            other => panic!("{headers}: {other:?}"),
        };
        for none in ["", "Content-Length: 0\r\n", "Content-Length: 0\r\nContent-Length: 00\r\n"] {
            assert_eq!(content(none), Content::None, "{none}");
        }
        for body in [
            "Content-Length: 1\r\n",
            "Content-Length: 4611686018427387904\r\n",
            "Content-Length: 18446744073709551615\r\n",
            "Content-Length: 99999999999999999999999999\r\n",
            "Content-Length: 7\r\nContent-Length: 07\r\n",
            "Transfer-Encoding: chunked\r\n",
            "Content-Length: 0\r\nTransfer-Encoding: identity\r\n",
        ] {
            assert_eq!(content(body), Content::Body, "{body}");
        }
        for malformed in ["-1", "+1", "1,1", "0x1", "", "1\r\nContent-Length: 2"] {
            assert_eq!(content(&format!("Content-Length: {malformed}\r\n")), Content::Malformed, "{malformed}");
        }
    }

    #[test]
    fn what_is_too_long_or_no_request_is_refused() {
        let long = |start: &str| Head::read(format!("{start}{}", "a".repeat(MAX_HEAD)).as_bytes());
        for start in ["GET /", "GET / HTTP/1.1\r\nA: ", "GET / HTTP/1.1\r\n"] {
            assert_eq!(long(start), Head::TooLarge, "{start}");
        }
        assert_eq!(Head::read(&b"\r\n".repeat(MAX_HEAD)), Head::TooLarge);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(Head::read(many.as_bytes()), Head::TooLarge);
        for garbage in ["\x16\x03\x01\x02", "GET\r\n", "GET / HTTP/2.0\r\n", "GET / HTTP/1.1\r\n: a\r\n", "\0"] {
            assert_eq!(Head::read(garbage.as_bytes()), Head::Malformed, "{garbage:?}");
        }
    }
}
