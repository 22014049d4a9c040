//! The answers of the server.

use std::sync::Arc;

/// The content of an answer. Answers to several clients can share it.
pub(crate) type Body = Arc<Vec<u8>>;

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: Body,
    /// One more header: the name and the value.
    pub(crate) header: Option<(&'static str, &'static str)>,
}

/// The outcome of a request.
pub(crate) enum Reply {
    /// The answer.
    Now(Answer),
    /// Work that gives the answer, for a thread of its own.
    Later(Box<dyn FnOnce() -> Answer + Send>),
}

impl Answer {
    /// A success with this content.
    pub(crate) fn new(content_type: &'static str, body: Body) -> Answer {
        Answer { status: 200, content_type, body, header: None }
    }

    /// A line of text with this status.
    pub(crate) fn text(status: u16, text: &str) -> Answer {
        let body = Arc::new(format!("{text}\n").into_bytes());
        Answer { status, ..Answer::new("text/plain; charset=utf-8", body) }
    }

    /// The answer with one more header.
    pub(crate) fn with(self, name: &'static str, value: &'static str) -> Answer {
        Answer { header: Some((name, value)), ..self }
    }

    /// The head of the answer, with these headers of the site.
    pub(super) fn head(&self, headers: &[(&'static str, String)]) -> String {
        let Answer { status, content_type, body, header } = self;
        let reason = match status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            413 => "Content Too Large",
            431 => "Request Header Fields Too Large",
            500 => "Internal Server Error",
            503 => "Service Unavailable",
            _ => "",
        };
        let mut head = format!("HTTP/1.1 {status} {reason}\r\n");
        let own = [("Content-Type", *content_type), ("Connection", "close")].into_iter().chain(*header);
        for (name, value) in own.chain(headers.iter().map(|(name, value)| (*name, value.as_str()))) {
            head += &format!("{name}: {value}\r\n");
        }
        head + &format!("Content-Length: {}\r\n\r\n", body.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_all_headers() {
        let answer = Answer::text(405, "GET only").with("Allow", "GET");
        assert_eq!(
            answer.head(&[("X-Content-Type-Options", "nosniff".to_owned())]),
            "HTTP/1.1 405 Method Not Allowed\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\
             Allow: GET\r\nX-Content-Type-Options: nosniff\r\nContent-Length: 9\r\n\r\n"
        );
    }
}
