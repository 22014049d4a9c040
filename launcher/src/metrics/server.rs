//! Answers scrapes over HTTP: `GET /metrics`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::exposition::{Format, text};
use super::figures::Figures;
use crate::http::{Address, Answer, Body, Listener, Reply, Request, Server, Site, Token, may_be_foreign};
use crate::message::WithHelp;

/// How long an answer serves other scrapes too. The figures are locked while they are read, which delays recording.
const MAX_AGE: Duration = Duration::from_millis(50);

/// The address that serves the metrics. It is bound before the command starts, so that an address in use is an error.
#[derive(Debug)]
pub(crate) struct MetricsListener {
    listener: Listener,
    address: Address,
    token: Option<Token>,
}

/// The running server. It ends with this value.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    _server: Server,
}

impl MetricsListener {
    /// Listens on an address, for scrapers that know the token in this file. Port 0 takes a free port.
    pub(crate) fn bind(address: &Address, token_file: Option<&Path>) -> anyhow::Result<MetricsListener> {
        let token = token_file.map(Token::from_file).transpose()?;
        let listener = Listener::bind(address).map_err(|e| {
            let help = match address {
                Address::Tcp(_) => "choose another address, or port 0 for a free port",
                Address::Unix(_) => "choose another path, in a folder that only you can change",
            };
            WithHelp::new(format!("cannot serve metrics on {address}: {e}"), help)
        })?;
        let address = listener.address().context("cannot find out the port")?;
        Ok(MetricsListener { listener, address, token })
    }

    /// The URL of the metrics.
    pub(crate) fn url(&self) -> String {
        match &self.address {
            Address::Tcp(address) => format!("http://{address}/metrics"),
            path @ Address::Unix(_) => path.to_string(),
        }
    }

    /// Starts to answer. The thread inherits the signal mask.
    pub(crate) fn serve(self, figures: Figures) -> anyhow::Result<MetricsServer> {
        let is_loopback = matches!(self.address, Address::Tcp(address) if address.ip().is_loopback());
        let site = Metrics {
            figures,
            own_name: (is_loopback && self.token.is_none()).then(crate::host::name),
            token: self.token,
            headers: [("X-Content-Type-Options", "nosniff".to_owned())],
            newest: None,
        };
        let server = Server::start(self.listener, site, "memtrace-metrics");
        Ok(MetricsServer { _server: server.map_err(|e| anyhow!("cannot serve metrics: {e}"))? })
    }
}

/// The metrics, and who may read them.
struct Metrics {
    figures: Figures,
    token: Option<Token>,
    /// The name of this machine, if the requests must be addressed to it: the pages of a browser on this machine could
    /// lead their own name to a loopback address.
    own_name: Option<String>,
    headers: [(&'static str, String); 1],
    newest: Option<(Instant, Format, Body)>,
}

impl Metrics {
    fn text(&mut self, format: Format) -> Body {
        match &self.newest {
            Some((read, of, body)) if *of == format && read.elapsed() < MAX_AGE => Arc::clone(body),
            _ => {
                let text = text(&self.figures.now(), self.figures.unfollowed_events(), format);
                let body = Body::new(text.into_bytes());
                self.newest = Some((Instant::now(), format, Arc::clone(&body)));
                body
            }
        }
    }
}

impl Site for Metrics {
    fn headers(&self) -> &[(&'static str, String)] {
        &self.headers
    }

    fn refusal(&self, request: &Request) -> Option<Answer> {
        if let Some(token) = &self.token {
            let knows = request.authorization.as_deref().is_some_and(|authorization| token.is_in(authorization));
            return (!knows).then(|| {
                let text = "the request lacks the token: Authorization: Bearer TOKEN";
                Answer::text(401, text).with("WWW-Authenticate", "Bearer")
            });
        }
        let own = self.own_name.as_deref()?;
        let is_foreign = request.hosts.iter().any(|host| may_be_foreign(host, own));
        is_foreign
            .then(|| Answer::text(403, "the request is not addressed to this machine: use its address or localhost"))
    }

    fn reply(&mut self, request: &Request) -> Reply {
        let (path, _) = request.path_and_query();
        Reply::Now(match (request.method.as_str(), path) {
            ("GET" | "HEAD", "/metrics") => {
                let format = Format::accepted(request.accept.as_deref());
                Answer::new(format.content_type(), self.text(format))
            }
            ("GET" | "HEAD", _) => Answer::text(404, "the metrics are at /metrics"),
            _ => Answer::text(405, "only GET is answered").with("Allow", "GET, HEAD"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(token: Option<&str>, own_name: Option<&str>) -> Metrics {
        Metrics {
            figures: Figures::default(),
            token: token.map(|token| Token::new(token.to_owned())),
            own_name: own_name.map(str::to_owned),
            headers: [("X-Content-Type-Options", "nosniff".to_owned())],
            newest: None,
        }
    }

    fn request(method: &str, target: &str) -> Request {
        let (method, target) = (method.to_owned(), target.to_owned());
        Request { method, target, hosts: Vec::new(), authorization: None, accept: None }
    }

    #[test]
    fn a_page_of_another_site_reads_nothing_on_a_loopback_address() {
        let status = |site: &Metrics, hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            site.refusal(&Request { hosts, ..request("GET", "/metrics") }).map_or(200, |answer| answer.status)
        };
        let loopback = metrics(None, Some("gpu7"));
        for hosts in [&[][..], &["127.0.0.1:9400"], &["localhost"], &["gpu7:9400"]] {
            assert_eq!(status(&loopback, hosts), 200, "{hosts:?}");
        }
        for hosts in [&["evil.example"][..], &["localhost", "evil.example"]] {
            assert_eq!(status(&loopback, hosts), 403, "{hosts:?}");
            assert_eq!(status(&metrics(None, None), hosts), 200, "any name leads to another address");
        }
    }

    #[test]
    fn with_a_token_others_get_nothing() {
        let site = metrics(Some("0123456789abcdef"), None);
        let with = |authorization: &str| {
            let authorization = Some(authorization.to_owned());
            site.refusal(&Request { authorization, ..request("GET", "/metrics") }).map(|answer| answer.status)
        };
        assert_eq!(with("Bearer 0123456789abcdef"), None);
        assert_eq!(with("Bearer 0123456789abcdeF"), Some(401));
        let answer = site.refusal(&request("POST", "/")).expect("a refusal");
        assert_eq!((answer.status, answer.header), (401, Some(("WWW-Authenticate", "Bearer"))));
    }

    #[test]
    fn only_the_metrics_can_be_read() {
        let mut site = metrics(None, None);
        for (method, target, status) in [
            ("GET", "/metrics", 200),
            ("HEAD", "/metrics?x", 200),
            ("GET", "/", 404),
            ("GET", "http://127.0.0.1/metrics", 404),
            ("GET", "*", 404),
            ("POST", "/metrics", 405),
        ] {
            let Reply::Now(answer) = site.reply(&request(method, target)) else { panic!("an answer at once") };
            assert_eq!(answer.status, status, "{method} {target}");
        }
    }
}
