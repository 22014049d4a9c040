//! `memtrace open --serve`: serves the HTML report of a run to this machine. The page asks for all events and blocks of
//! the windows into which one zooms.
//!
//! This process reads no file of the run. A sandboxed worker reads it, writes the page, and answers one window at a
//! time. It streams the recording for each window, so its memory is bounded as that of an export.

mod answers;
mod query;
mod worker;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::http::{Listener, Server, Token};
use crate::message::{self, WithHelp};
use crate::signals::EndSignals;
use answers::{ServedRun, SharedAnalysis};
use worker::Analysis;

/// The bytes of a token.
const TOKEN_BYTES: usize = 16;

/// Serves the page until a signal, or until the terminal or the pipe at stdin closes. Returns the exit code.
pub(super) fn serve(run: &Path, port: Option<u16>) -> u8 {
    // This process has no threads yet, so it can fork.
    let mut analysis = match Analysis::start(run) {
        Ok(analysis) => analysis,
        Err(e) => return super::exit_code(Err(e)),
    };
    let listener = match listen(port) {
        Ok(listener) => listener,
        Err(e) => {
            analysis.end();
            return super::exit_code(Err(e));
        }
    };
    let page = match analysis.page() {
        Ok(Some(page)) => page,
        // The worker has printed the reason.
        Ok(None) => return analysis.exit_code(),
        Err(e) => return super::exit_code(Err(e)),
    };
    super::exit_code(until_end(run, listener, page, analysis))
}

/// The listening socket, on this machine only.
fn listen(port: Option<u16>) -> anyhow::Result<TcpListener> {
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port.unwrap_or(0));
    TcpListener::bind(address).map_err(|e| match (e.kind(), port) {
        (io::ErrorKind::AddrInUse, Some(port)) => WithHelp::new(
            format!("cannot listen on port {port}: another program uses it"),
            "choose another one, or leave out --port to take a free one",
        )
        .into(),
        _ => anyhow!(e).context(format!("cannot listen on {address}")),
    })
}

fn until_end(run: &Path, listener: TcpListener, page: Vec<u8>, analysis: Analysis) -> anyhow::Result<()> {
    let port = listener.local_addr().context("cannot find out the port")?.port();
    let token = random_token().context("cannot make a token")?;
    let url = format!("http://127.0.0.1:{port}/{}/", token.text());
    // Others can see the command line of the browser, so the URL is in a file that only this user can read. The browser
    // starts before signals are blocked, because it inherits that. Its first request waits for the server.
    let redirect = Redirect::to(&url);
    match &redirect {
        Ok(redirect) => _ = super::browser::show(&redirect.0),
        Err(e) => message::warning(&format!("cannot open the browser: {e}")),
    }
    // The threads that start from here on inherit the signal mask.
    let signals = EndSignals::block().context("cannot block signals")?;
    let listener = Listener::of(listener).context("cannot start the server")?;
    let analysis = SharedAnalysis::new(analysis);
    let server = Server::start(listener, ServedRun::new(token, page, analysis.clone()), "memtrace-serve")
        .context("cannot start the server")?;
    // Whoever reads the URL may close stdin at once.
    let watches_stdin = !is_closed(io::stdin().as_fd());
    super::print(format!("Serving {} at {url} ; press Ctrl-C to stop\n", run.display()).as_bytes())?;
    wait_for_end(&signals, watches_stdin);
    drop(server);
    analysis.end();
    Ok(())
}

/// A token that nobody can guess.
fn random_token() -> io::Result<Token> {
    let mut bytes = [0; TOKEN_BYTES];
    // Up to 256 bytes come whole.
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(Token::new(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
}

/// A file that leads a browser to a URL. Only this user can read it. It is removed with this value.
#[derive(Debug)]
struct Redirect(PathBuf);

impl Redirect {
    fn to(url: &str) -> io::Result<Redirect> {
        let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let folder = folder.filter(|folder| folder.is_dir()).unwrap_or_else(std::env::temp_dir);
        let path = folder.join(format!("memtrace-{}.html", random_token()?.text()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let redirect = Redirect(path);
        writeln!(
            file,
            "<!DOCTYPE html><meta http-equiv=\"refresh\" content=\"0; url={url}\"><a href=\"{url}\">memtrace</a>"
        )?;
        Ok(redirect)
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Waits for a signal, or until the terminal or the pipe at stdin closes.
fn wait_for_end(signals: &EndSignals, watches_stdin: bool) {
    let stdin = io::stdin();
    let stdin = stdin.as_fd();
    loop {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        if watches_stdin {
            // A closed terminal or pipe is reported without being asked for.
            fds.push(PollFd::from_borrowed_fd(stdin, PollFlags::empty()));
        }
        match poll(&mut fds, None) {
            Ok(_) if fds.iter().any(|fd| !fd.revents().is_empty()) => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return message::error(&format!("cannot wait for signals: {}", io::Error::from(e)), None),
        }
    }
}

/// Whether stdin was closed before: nothing can be learned from it then.
fn is_closed(stdin: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(stdin, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_err() || !fds[0].revents().is_empty()
}
