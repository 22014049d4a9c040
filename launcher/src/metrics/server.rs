//! Answers scrapes over HTTP: `GET /metrics`.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, anyhow};
use tiny_http::{Header, Method, Request, Response, Server, StatusCode};

use super::exposition::{Format, text};
use super::figures::Figures;
use crate::message::WithHelp;

/// The address that serves the metrics. It is bound before the command starts, so that an address in use is an error.
#[derive(Debug)]
pub(crate) struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
}

/// The running server.
pub(crate) struct MetricsServer {
    server: Arc<Server>,
    thread: JoinHandle<()>,
}

impl MetricsListener {
    /// Listens on an address. Port 0 takes a free port.
    pub(crate) fn bind(address: SocketAddr) -> anyhow::Result<MetricsListener> {
        let listener = TcpListener::bind(address).map_err(|e| {
            WithHelp::new(
                format!("cannot serve metrics on {address}: {e}"),
                "choose another address, or port 0 for a free port",
            )
        })?;
        let address = listener.local_addr().context("cannot find out the port")?;
        Ok(MetricsListener { listener, address })
    }

    /// The URL of the metrics.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }

    /// Starts to answer. The thread inherits the signal mask.
    pub(crate) fn serve(self, figures: Figures) -> anyhow::Result<MetricsServer> {
        let server = Server::from_listener(self.listener, None).map_err(|e| anyhow!("cannot serve metrics: {e}"))?;
        let server = Arc::new(server);
        let requests = Arc::clone(&server);
        let answer_all = move || requests.incoming_requests().for_each(|request| answer(request, &figures));
        let thread =
            Builder::new().name("memtrace-metrics".into()).spawn(answer_all).context("cannot start a thread")?;
        Ok(MetricsServer { server, thread })
    }
}

impl MetricsServer {
    /// Stops to answer.
    pub(crate) fn finish(self) {
        self.server.unblock();
        _ = self.thread.join();
    }
}

/// Answers a request. A client that is gone is not an error.
fn answer(request: Request, figures: &Figures) {
    let path = request.url().split('?').next().unwrap_or_default();
    let accept =
        request.headers().iter().find(|header| header.field.equiv("Accept")).map(|h| h.value.as_str().to_owned());
    let format = Format::accepted(accept.as_deref());
    let (status, content_type, body) = match (request.method(), path) {
        (Method::Get | Method::Head, "/metrics") => (200, format.content_type(), text(&figures.now(), format)),
        (Method::Get | Method::Head, _) => {
            (404, "text/plain; charset=utf-8", "the metrics are at /metrics\n".to_owned())
        }
        _ => (405, "text/plain; charset=utf-8", "only GET is answered\n".to_owned()),
    };
    let mut response = Response::from_string(body).with_status_code(StatusCode(status));
    let allow = (status == 405).then_some(("Allow", "GET, HEAD"));
    for (name, value) in
        [("Content-Type", content_type), ("X-Content-Type-Options", "nosniff")].into_iter().chain(allow)
    {
        if let Ok(header) = Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    _ = request.respond(response);
}
