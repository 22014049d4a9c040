//! The answers of the server: the page, windows of its recording, and refusals.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memtrace_analysis::{PageWindow, served_policy};

use super::query::window;
use super::worker::Analysis;
use crate::http::{Answer, Body, Reply, Request, Site, Token, is_loopback_name};

/// The content of the server.
#[derive(Debug)]
pub(super) struct ServedRun {
    token: Token,
    page: Body,
    headers: Vec<(&'static str, String)>,
    analysis: SharedAnalysis,
}

impl ServedRun {
    pub(super) fn new(token: Token, page: Vec<u8>, analysis: SharedAnalysis) -> ServedRun {
        let headers = vec![
            ("Cache-Control", "no-store".to_owned()),
            ("Content-Security-Policy", format!("{}; frame-ancestors 'none'", served_policy())),
            ("Cross-Origin-Resource-Policy", "same-origin".to_owned()),
            ("Referrer-Policy", "no-referrer".to_owned()),
            ("X-Content-Type-Options", "nosniff".to_owned()),
        ];
        ServedRun { token, page: Body::new(page), headers, analysis }
    }

    /// The path below the token, if the request has it.
    fn below_token<'a>(&self, request: &'a Request) -> Option<&'a str> {
        let (path, _) = request.path_and_query();
        let (token, rest) = path.strip_prefix('/')?.split_once('/')?;
        self.token.is(token).then_some(rest)
    }
}

impl Site for ServedRun {
    fn headers(&self) -> &[(&'static str, String)] {
        &self.headers
    }

    fn refusal(&self, request: &Request) -> Option<Answer> {
        match &request.hosts[..] {
            [host] if is_loopback_name(host) => {}
            _ => return Some(Answer::text(403, "the request is not addressed to 127.0.0.1 or localhost")),
        }
        let has_token = self.below_token(request).is_some();
        (!has_token).then(|| Answer::text(403, "the URL lacks the token that memtrace printed"))
    }

    fn reply(&mut self, request: &Request) -> Reply {
        if request.method != "GET" {
            return Reply::Now(Answer::text(405, "the server answers GET only").with("Allow", "GET"));
        }
        let (_, query) = request.path_and_query();
        Reply::Now(match self.below_token(request) {
            Some("") => Answer::new("text/html; charset=utf-8", Arc::clone(&self.page)),
            Some("window") => match window(query) {
                Some(window) => {
                    let analysis = self.analysis.clone();
                    return Reply::Later(Box::new(move || analysis.window(window)));
                }
                None => Answer::text(400, "a window needs process, device, from and to"),
            },
            _ => Answer::text(404, "the server has no such page"),
        })
    }
}

/// The analysis, until the server ends.
#[derive(Clone, Debug)]
pub(super) struct SharedAnalysis(Arc<Mutex<Option<Analysis>>>);

impl SharedAnalysis {
    pub(super) fn new(analysis: Analysis) -> SharedAnalysis {
        SharedAnalysis(Arc::new(Mutex::new(Some(analysis))))
    }

    /// A panic of another thread leaves an analysis that answers, or one that is gone.
    fn lock(&self) -> MutexGuard<'_, Option<Analysis>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a window.
    fn window(&self, window: PageWindow) -> Answer {
        match self.lock().as_mut().map(|analysis| analysis.window(window)) {
            Some(Ok(Some(data))) => Answer::new("application/octet-stream", Body::new(data)),
            Some(Ok(None)) => {
                Answer::text(404, "the page has no such process or device, or the window ends before it begins")
            }
            Some(Err(e)) => Answer::text(500, &format!("{e:#}")),
            None => Answer::text(503, "the server ends"),
        }
    }

    /// Ends the analysis, if it reads no window now. Else it ends with this process.
    pub(super) fn end(&self) {
        if let Ok(mut analysis) = self.0.try_lock()
            && let Some(analysis) = analysis.take()
        {
            analysis.end();
        }
    }
}
