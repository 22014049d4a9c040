//! Finds out when the command answers requests over HTTP (`memtrace dry-run --until-ready`) or has printed a line
//! (`--ready-line`), and ends it then.
//!
//! vLLM, SGLang, TGI and llama.cpp reply to `GET /health` with status 200 once they serve. So the listening TCP sockets
//! of the command's processes are asked, whatever their ports are. The processes and their answers are not trusted:
//! each step has a limit in time and bytes, and only sockets of the command's own processes are asked.

use std::collections::{BTreeSet, HashSet};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::proc::{ProcessDir, descendants};

/// The time between two rounds of questions.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long a server may take for each step of an answer.
const STEP: Duration = Duration::from_millis(1000);
/// How long a server may take to end after SIGTERM. Then it and its processes are killed.
const END: Duration = Duration::from_secs(30);
/// The maximum number of processes whose sockets are looked for, and of sockets that are asked in a round.
const MAX_PROCESSES: usize = 1024;
const MAX_SOCKETS: usize = 64;
/// The maximum length of the kernel's list of sockets in bytes.
const LIST_LIMIT: u64 = 16 << 20;
/// The state of a listening socket in `/proc/net/tcp` (include/net/tcp_states.h).
const LISTEN: &str = "0A";

/// The signs that a command is ready.
pub(crate) struct ReadyWatch {
    /// Whether its listening sockets are asked.
    pub(crate) asks_health: bool,
    /// Set when it has printed a line that says so.
    pub(crate) line: Option<Arc<AtomicBool>>,
}

/// The thread that asks.
pub(crate) struct ReadyThread {
    is_ready: Arc<AtomicBool>,
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl ReadyWatch {
    /// Starts to ask the processes of `command`. The pid must not be reused before [`ReadyThread::finish`]. `None` if
    /// nothing shows that it is ready.
    pub(crate) fn start(self, command: Pid) -> Option<std::io::Result<ReadyThread>> {
        (self.asks_health || self.line.is_some()).then(|| self.spawn(command))
    }

    fn spawn(self, command: Pid) -> std::io::Result<ReadyThread> {
        let is_ready = Arc::new(AtomicBool::new(false));
        let (stop, stopped) = channel();
        let found = Arc::clone(&is_ready);
        let thread = std::thread::Builder::new().name("ready".to_owned()).spawn(move || {
            let wait = |time| matches!(stopped.recv_timeout(time), Err(RecvTimeoutError::Timeout));
            while wait(INTERVAL) {
                let has_printed = self.line.as_ref().is_some_and(|line| line.load(Ordering::Acquire));
                if has_printed || self.asks_health && listening(command).into_iter().any(is_healthy) {
                    found.store(true, Ordering::Release);
                    end(command, wait);
                    return;
                }
            }
        })?;
        Ok(ReadyThread { is_ready, stop, thread })
    }
}

impl ReadyThread {
    /// Stops to ask. Whether the command was ready, and this has ended it.
    pub(crate) fn finish(self) -> bool {
        drop(self.stop);
        // The thread does not panic, and asks for a bounded time.
        let _ = self.thread.join();
        self.is_ready.load(Ordering::Acquire)
    }
}

/// Ends the command: SIGTERM first, as for a server that is stopped by hand. `wait` returns `false` once it has ended.
fn end(command: Pid, wait: impl Fn(Duration) -> bool) {
    // The launcher collects the command only after `finish`, so the pid is still its.
    let _ = kill_process(command, Signal::TERM);
    if wait(END) {
        for pid in descendants(command).into_iter().chain([command]) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// The addresses at which processes of the command listen.
fn listening(command: Pid) -> BTreeSet<SocketAddr> {
    let mut own: HashSet<String> = HashSet::new();
    let network = ProcessDir::of(std::process::id()).network();
    for pid in descendants(command).into_iter().chain([command]).take(MAX_PROCESSES) {
        let process = ProcessDir::of(pid.as_raw_nonzero().get() as u32);
        // A socket in another network namespace cannot be reached.
        if process.network() != network {
            continue;
        }
        let descriptors = std::fs::read_dir(process.file("fd")).into_iter().flatten().flatten();
        let links = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
        own.extend(links.filter_map(|link| {
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        }));
    }
    let mut addresses = BTreeSet::new();
    for list in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        let (Ok(file), mut text) = (std::fs::File::open(list), String::new()) else { continue };
        if file.take(LIST_LIMIT).read_to_string(&mut text).is_ok() {
            let found = text.lines().filter_map(listener).filter(|(_, inode)| own.contains(*inode));
            addresses.extend(found.map(|(address, _)| address).take(MAX_SOCKETS));
        }
    }
    addresses
}

/// The address and the inode of a listening socket in a line of `/proc/net/tcp` or `tcp6`.
fn listener(line: &str) -> Option<(SocketAddr, &str)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
    let (address, port) = local.split_once(':').filter(|_| *state == LISTEN)?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // The kernel prints each 32-bit word of the address in the byte order of the machine.
    let words: Option<Vec<u32>> =
        (0..address.len() / 8).map(|at| u32::from_str_radix(address.get(8 * at..8 * at + 8)?, 16).ok()).collect();
    let bytes: Vec<u8> = words?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    let reachable = match address {
        IpAddr::V4(any) if any.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(any) if any.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        other => other,
    };
    Some((SocketAddr::new(reachable, port), inode))
}

/// Whether a server replies to `/health` with status 200.
fn is_healthy(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&address, STEP)?;
        stream.set_read_timeout(Some(STEP))?;
        stream.set_write_timeout(Some(STEP))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        // The status line fits into one segment. A server that sends it byte by byte is asked again.
        let mut start = [0; 32];
        let read = stream.read(&mut start)?;
        let line = String::from_utf8_lossy(&start[..read]).into_owned();
        Ok(line.starts_with("HTTP/1.") && line.split_ascii_whitespace().nth(1) == Some("200"))
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Instant;

    #[test]
    fn listeners_are_read_from_the_kernels_list() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 4242 1 0 100 0";
        assert_eq!(listener(line), Some(("127.0.0.1:8080".parse().unwrap(), "4242")));
        let any =
            "   1: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 7";
        assert_eq!(listener(any), Some(("[::1]:80".parse().unwrap(), "7")));
        assert_eq!(listener(&line.replace(" 0A ", " 01 ")), None, "a connection");
        assert_eq!(listener("  sl  local_address rem_address   st"), None);
        assert_eq!(listener("0: \u{e9}\u{e9}\u{e9}\u{e9}:0050 x 0A 0 0 0 0 0 7"), None);
    }

    #[test]
    fn own_sockets_are_found() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = listening(rustix::process::getpid());
        assert!(found.contains(&server.local_addr().unwrap()), "{found:?}");
    }

    /// Serves one connection with these bytes, then keeps it open.
    fn server(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(answer);
            std::thread::sleep(5 * STEP);
        });
        address
    }

    #[test]
    fn only_status_200_is_healthy_and_silence_is_bounded() {
        assert!(is_healthy(server(b"HTTP/1.1 200 OK\r\n\r\n")));
        for other in [&b"HTTP/1.1 503 Service Unavailable\r\n\r\n"[..], b"HTTP/1.1 2000", b"SSH-2.0-x\r\n", &[0xff; 64]]
        {
            assert!(!is_healthy(server(other)));
        }
        let begin = Instant::now();
        assert!(!is_healthy(server(b"")));
        assert!(begin.elapsed() < 4 * STEP);
    }
}
