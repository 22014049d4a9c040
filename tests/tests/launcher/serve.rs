//! `memtrace open --serve`: who gets an answer, what a window has beside an export of it, and how the server ends.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use memtrace_analysis::export::{Selection, Window, blocks_csv};
use memtrace_analysis::open_run;
use memtrace_tests::traced_program::with_default_signals;

use crate::launcher_support::{Running, children, memtrace, output, stderr, wait_for};
use crate::page_data::decode;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/snapshots/resnet_leak.pickle.gz")
}

/// A running server.
pub(super) struct Server {
    pub(super) running: Running,
    pub(super) port: u16,
    pub(super) token: String,
}

/// An answer: status, headers, body.
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

fn command() -> Command {
    let mut command = Command::new(memtrace());
    command.arg("open").arg(golden()).arg("--serve");
    for name in ["BROWSER", "DISPLAY", "WAYLAND_DISPLAY"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    with_default_signals(&mut command);
    command
}

impl Server {
    pub(super) fn start() -> Server {
        Server::of(&mut command())
    }

    fn of(command: &mut Command) -> Server {
        let mut running = Running::start(command);
        let line = running.line();
        let rest = line.strip_prefix(&format!("Serving {} at http://127.0.0.1:", golden().display()));
        let (address, end) = rest.and_then(|rest| rest.split_once('/')).unwrap_or_else(|| panic!("{line}"));
        assert_eq!(end.split_once("/ ; ").unwrap().1, "press Ctrl-C to stop");
        let token = end.split('/').next().unwrap().to_owned();
        Server { running, port: address.parse().unwrap(), token }
    }

    /// Sends a request as it is.
    fn send(&self, request: &str) -> Answer {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("an answer");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head, body: bytes[end + 4..].to_vec() }
    }

    fn request(&self, method: &str, host: &str, path: &str) -> Answer {
        self.send(&format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\n\r\n"))
    }

    /// Gets what is below the token.
    fn get(&self, path: &str) -> Answer {
        self.request("GET", &format!("127.0.0.1:{}", self.port), &format!("/{}/{path}", self.token))
    }

    /// The exit code of a server that ends.
    pub(super) fn exit_code(mut self) -> Option<i32> {
        self.running.child.wait().unwrap().code()
    }
}

#[test]
fn only_requests_to_this_machine_with_the_token_are_answered() {
    let server = Server::start();
    let page = server.get("");
    assert_eq!(page.status, 200);
    assert!(page.body.starts_with(b"<!DOCTYPE html>"));
    let head = page.head.to_lowercase();
    for header in [
        "cache-control: no-store",
        "referrer-policy: no-referrer",
        "x-content-type-options: nosniff",
        "cross-origin-resource-policy: same-origin",
    ] {
        assert!(head.contains(header), "{header}: {head}");
    }
    let policy = head.split_once("content-security-policy: ").unwrap().1.split_once("\r\n").unwrap().0;
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(policy.contains("; connect-src 'self'; ") && policy.ends_with("; frame-ancestors 'none'"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");

    let (port, token) = (server.port, &server.token);
    let (host, path) = (format!("127.0.0.1:{port}"), format!("/{token}/"));
    // The port can be forwarded, so any port of this machine is right.
    for good in [&host, "localhost", "localhost:1", "127.0.0.1"] {
        assert_eq!(server.request("GET", good, &path).status, 200, "{good}");
    }
    for bad in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1.evil.example", "[::1]", ""] {
        let answer = server.request("GET", bad, &path);
        assert_eq!(answer.status, 403, "{bad}");
        assert!(!String::from_utf8_lossy(&answer.body).contains(token.as_str()));
    }
    assert_eq!(server.send(&format!("GET {path} HTTP/1.0\r\n\r\n")).status, 403, "no host");
    let two = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\nHost: evil.example\r\n\r\n");
    assert_eq!(server.send(&two).status, 403, "two hosts");
    let other = token.replace(|c: char| c.is_ascii_digit(), "a");
    for wrong in ["/", "", "//", &format!("/{other}x/"), &format!("/{}/", &token[1..]), &format!("/{token}"), "/window"]
    {
        let answer = server.request("GET", &host, if wrong.is_empty() { "*" } else { wrong });
        assert_eq!(answer.status, 403, "{wrong}");
        assert!(!String::from_utf8_lossy(&answer.body).contains(token.as_str()));
    }
    for method in ["POST", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"] {
        assert_eq!(server.request(method, &host, &path).status, 405, "{method}");
    }
    for (path, status) in [
        ("report.html", 404),
        ("../", 404),
        ("window", 400),
        ("window?process=0&device=0&from=1", 400),
        ("window?process=0&device=0&from=1&to=-2", 400),
        ("window?process=0&device=0&from=1&to=2&to=3", 400),
        ("window?process=1&device=0&from=1&to=2", 404),
        ("window?process=0&device=7&from=1&to=2", 404),
        ("window?process=0&device=0&from=2&to=1", 404),
    ] {
        assert_eq!(server.get(path).status, status, "{path}");
    }
}

/// Address, size, allocation, free in the window, category.
type Block = (u64, u64, u64, Option<u64>, String);

#[test]
fn a_window_is_that_of_the_export() {
    let server = Server::start();
    let run = open_run(golden()).unwrap();
    let process = &run.processes()[0];
    let steps = |steps| Selection { steps: Some(steps), ..Selection::default() };
    let newest = |events| Selection { max_events: Some(events), ..Selection::default() };
    for selection in [steps((1, 1)), steps((0, 1)), newest(300), newest(1)] {
        let window = Window::of(process, &selection, &mut |_| {}).unwrap();
        let (first, last) = window.bounds().unwrap();
        let mut csv = Vec::new();
        blocks_csv(process, &window, None, &mut csv, &mut |_| {}).unwrap();
        let csv = String::from_utf8(csv).unwrap();
        let mut rows = csv.lines().map(|row| row.split(',').collect::<Vec<_>>());
        let names = rows.next().unwrap();
        let column = |name| names.iter().position(|one| *one == name).unwrap();
        let (address, size) = (column("address"), column("size"));
        let (alloc, free, category) = (column("alloc_seq"), column("free_seq"), column("category"));
        let exported = |row: Vec<&str>| -> Block {
            let number = |at: usize| row[at].parse().unwrap();
            let free = (!row[free].is_empty()).then(|| number(free));
            (number(address), number(size), number(alloc), free, row[category].to_owned())
        };
        let exported: BTreeSet<Block> = rows.map(exported).collect();

        let answer = server.get(&format!("window?process=0&device=0&from={first}&to={last}"));
        assert_eq!(answer.status, 200, "{}", answer.head);
        let mut plain = Vec::new();
        flate2::read::ZlibDecoder::new(&answer.body[..]).read_to_end(&mut plain).unwrap();
        let data = decode(&plain);
        let names = data.json["categories"].as_array().unwrap();
        let of_device = &data.devices[&0];
        let block = |block: &crate::page_data::Listed| -> Block {
            let category = names[block.category as usize]["name"].as_str().unwrap().to_owned();
            (block.address, block.size, block.alloc, block.free.filter(|free| *free <= last), category)
        };
        let sent: BTreeSet<Block> = of_device.blocks.iter().map(block).collect();
        assert!(!sent.is_empty());
        assert_eq!(sent, exported, "events {first} to {last}");
        assert!(of_device.events.iter().skip(1).all(|seq| (first..=last).contains(seq)));
    }
}

#[test]
fn signals_end_the_server_with_success() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let server = Server::start();
        let workers = children(server.running.pid());
        assert_eq!(workers.len(), 1, "one process reads the run");
        server.running.signal(signal);
        assert_eq!(server.exit_code(), Some(0), "signal {signal}");
        assert!(!Path::new(&format!("/proc/{}", workers[0])).exists(), "the worker has ended");
    }
}

#[test]
fn ctrl_c_reaches_the_server_only_and_nohup_is_respected() {
    let server = Server::start();
    for signal in [libc::SIGINT, libc::SIGHUP] {
        crate::launcher_support::kill(children(server.running.pid())[0], signal);
        assert_eq!(server.get("window?process=0&device=0&from=1&to=9").status, 200, "the server decides when it ends");
    }
    let mut ignoring = command();
    let ignore = || {
        // SAFETY: `signal` is async-signal-safe, so it may run between fork and exec. `SIG_IGN` installs no handler.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: the closure only calls `signal`, which is async-signal-safe. It allocates nothing.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut ignoring, ignore) };
    let server = Server::of(&mut ignoring);
    server.running.signal(libc::SIGHUP);
    assert_eq!(server.get("").status, 200);
    server.running.signal(libc::SIGINT);
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn the_end_of_stdin_ends_the_server() {
    let mut server = Server::of(command().stdin(Stdio::piped()));
    assert_eq!(server.get("").status, 200);
    drop(server.running.child.stdin.take());
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn the_worker_ends_with_a_killed_server() {
    let server = Server::start();
    let worker = children(server.running.pid())[0];
    server.running.signal(libc::SIGKILL);
    // A process that nobody has waited for yet has no memory.
    let has_ended = || std::fs::read(format!("/proc/{worker}/maps")).map_or(true, |maps| maps.is_empty());
    wait_for(has_ended);
}

#[test]
fn a_killed_worker_is_an_error_of_windows_only() {
    let mut server = Server::start();
    crate::launcher_support::kill(children(server.running.pid())[0], libc::SIGKILL);
    for _ in 0..2 {
        let answer = server.get("window?process=0&device=0&from=1&to=9");
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, 500, "{text}");
        assert!(
            text.contains("worker process was killed") && text.contains("start memtrace open --serve again"),
            "{text}"
        );
    }
    assert_eq!(server.get("").status, 200);
    server.running.signal(libc::SIGINT);
    let mut text = String::new();
    server.running.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("error: cannot read a window").count(), 1, "{text}");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn bad_ports_and_bad_runs_are_errors_with_help() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = output(command().args(["--port", &port]));
    assert_eq!(
        stderr(&ended),
        format!(
            "error: cannot listen on port {port}: another program uses it\nhelp: choose another one, or leave out \
             --port to take a free one\n"
        )
    );
    assert_eq!((ended.status.code(), ended.stdout.len()), (Some(2), 0));
    let missing = output(Command::new(memtrace()).args(["open", "--serve", "/no/such/run"]));
    assert_eq!((missing.status.code(), missing.stdout.len()), (Some(2), 0));
    assert!(
        stderr(&missing).starts_with("error: ") && stderr(&missing).contains("/no/such/run"),
        "{}",
        stderr(&missing)
    );
    let alone = output(Command::new(memtrace()).args(["open", "--port", "8000"]).arg(golden()));
    assert_eq!(alone.status.code(), Some(2), "--port needs --serve: {}", stderr(&alone));
}

#[test]
fn the_chosen_port_is_taken_and_the_browser_gets_the_url_in_a_private_file() {
    let folder = tempfile::tempdir().unwrap();
    let (browser, url) = (folder.path().join("browser"), folder.path().join("url"));
    std::fs::write(
        &browser,
        format!(
            "#!/bin/sh\n(stat -c '%a' \"$1\"; echo \"$1\"; cat \"$1\") > {0}.part && mv {0}.part {0}\n",
            url.display()
        ),
    )
    .unwrap();
    std::fs::set_permissions(&browser, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let server = Server::of(
        command().args(["--port", &free.to_string()]).env("BROWSER", &browser).env("XDG_RUNTIME_DIR", folder.path()),
    );
    assert_eq!(server.port, free);
    wait_for(|| url.exists());
    let seen = std::fs::read_to_string(&url).unwrap();
    let [mode, file, page] = seen.lines().collect::<Vec<_>>()[..] else { panic!("{seen}") };
    assert_eq!((mode, Path::new(file).parent()), ("600", Some(folder.path())));
    assert!(page.contains(&format!("content=\"0; url=http://127.0.0.1:{free}/{}/\"", server.token)), "{page}");
    assert!(!file.contains(&server.token));
    server.running.signal(libc::SIGINT);
    let file = file.to_owned();
    assert_eq!(server.exit_code(), Some(0));
    assert!(!Path::new(&file).exists(), "the file is removed");
}
