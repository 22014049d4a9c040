//! The answers of the server: the page, windows of its recording, and refusals.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_analysis::{PageWindow, served_policy};
use tiny_http::{Header, Method, Request, Response, StatusCode};

use super::access::{Token, is_local_host};
use super::worker::Analysis;

/// The number of windows that are read or wait for it. The page asks for one at a time.
const MOST_WINDOWS: usize = 2;

/// An answer before it is sent.
struct Answer {
    status: u16,
    content_type: &'static str,
    body: Vec<u8>,
}

impl Answer {
    fn text(status: u16, text: &str) -> Answer {
        Answer { status, content_type: "text/plain; charset=utf-8", body: format!("{text}\n").into_bytes() }
    }
}

/// What the server has.
#[derive(Debug)]
pub(super) struct Site {
    token: Token,
    page: Vec<u8>,
    policy: String,
    analysis: Mutex<Option<Analysis>>,
    windows: AtomicUsize,
}

impl Site {
    pub(super) fn new(token: Token, page: Vec<u8>, analysis: Analysis) -> Site {
        let policy = format!("{}; frame-ancestors 'none'", served_policy());
        Site { token, page, policy, analysis: Mutex::new(Some(analysis)), windows: AtomicUsize::new(0) }
    }

    /// Answers a request. A client that is gone is not an error.
    pub(super) fn answer(&self, request: Request) {
        let hosts: Vec<&str> = request
            .headers()
            .iter()
            .filter(|header| header.field.equiv("Host"))
            .map(|header| header.value.as_str())
            .collect();
        let answer = match hosts[..] {
            [host] if is_local_host(host) => self.answer_to(request.method(), request.url()),
            _ => Answer::text(403, "the request is not addressed to 127.0.0.1 or localhost"),
        };
        let Answer { status, content_type, body } = answer;
        let mut response = Response::from_data(body).with_status_code(StatusCode(status));
        let headers = [
            ("Content-Type", content_type),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", self.policy.as_str()),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ];
        let allow = (status == 405).then_some(("Allow", "GET"));
        for (name, value) in headers.into_iter().chain(allow) {
            if let Ok(header) = Header::from_bytes(name, value) {
                response.add_header(header);
            }
        }
        let _ = request.respond(response);
    }

    fn answer_to(&self, method: &Method, url: &str) -> Answer {
        if *method != Method::Get {
            return Answer::text(405, "the server answers GET only");
        }
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        let parts = path.strip_prefix('/').and_then(|path| path.split_once('/'));
        match parts {
            Some((token, rest)) if self.token.is(token) => match rest {
                "" => Answer { status: 200, content_type: "text/html; charset=utf-8", body: self.page.clone() },
                "window" => match window(query) {
                    Some(window) => self.window(window),
                    None => Answer::text(400, "a window needs process, device, from and to"),
                },
                _ => Answer::text(404, "the server has no such page"),
            },
            _ => Answer::text(403, "the URL lacks the token that memtrace printed"),
        }
    }

    /// Reads a window. Others wait meanwhile.
    fn window(&self, window: PageWindow) -> Answer {
        if self.windows.fetch_add(1, Ordering::AcqRel) >= MOST_WINDOWS {
            self.windows.fetch_sub(1, Ordering::AcqRel);
            return Answer::text(503, "other windows are being read");
        }
        // A panic of another thread leaves an analysis that answers, or one that is gone.
        let mut analysis = self.analysis.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let answer = match analysis.as_mut().map(|analysis| analysis.window(window)) {
            Some(Ok(Some(data))) => Answer { status: 200, content_type: "application/octet-stream", body: data },
            Some(Ok(None)) => {
                Answer::text(404, "the page has no such process or device, or the window ends before it begins")
            }
            Some(Err(e)) => Answer::text(500, &format!("{e:#}")),
            None => Answer::text(503, "the server ends"),
        };
        drop(analysis);
        self.windows.fetch_sub(1, Ordering::AcqRel);
        answer
    }

    /// Ends the analysis, if it reads no window now. Else it ends with this process.
    pub(super) fn end(&self) {
        if let Ok(mut analysis) = self.analysis.try_lock()
            && let Some(analysis) = analysis.take()
        {
            analysis.end();
        }
    }
}

/// The window that a query asks for: `process=0&device=0&from=17&to=99`.
fn window(query: &str) -> Option<PageWindow> {
    let value = |name: &str| {
        let mut values = query.split('&').filter_map(|part| part.split_once('=')).filter(|(key, _)| *key == name);
        values.next().map(|(_, value)| value).filter(|_| values.next().is_none())
    };
    Some(PageWindow {
        process: value("process")?.parse().ok()?,
        device: value("device")?.parse().ok()?,
        first: value("from")?.parse().ok()?,
        last: value("to")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let expected = PageWindow { process: 1, device: -1, first: 17, last: 99 };
        assert_eq!(window("process=1&device=-1&from=17&to=99"), Some(expected));
        assert_eq!(window("to=99&from=17&device=-1&process=1&more=0"), Some(expected));
        for query in
            ["", "process=1&device=0&from=17", "process=1&device=0&from=17&to=x", "process=1&device=0&from=1&to=9&to=8"]
        {
            assert_eq!(window(query), None, "{query}");
        }
    }
}
