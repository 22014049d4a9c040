//! A program that connects to the launcher as the preloaded library does, and then misbehaves.
//!
//! It reads the session from its environment; arguments are words that are executed in order. It does nothing that the
//! kernel does not allow every program.
//!
//! At the launcher's socket:
//! - `silent=N` keeps N connections that never send anything
//! - `garbage=N` makes N connections that send random bytes
//! - `half=N` keeps N connections that stop in the middle of their hello
//! - `gifts=N` makes N connections whose hello carries 64 descriptors
//! - `flood=MS` connects and disconnects as fast as it can
//! - `images=N` requests N segments, one after the other
//! - `ghost` passes its connection to a process that sends a hello when this process is dead
//! - `ask` makes one request and prints `served` or `refused`
//! - `squat=TOKEN` listens at the address of that session's launcher, and prints how many bytes the first caller sent
//!
//! In the shared memory:
//! - `windows=N` N children, each of which makes the launcher wait for its first event
//! - `jumps` sequence numbers far ahead, and the largest possible number of the next event
//! - `ids` definitions whose ids are far apart
//! - `texts` the longest notices, and strings without an end
//! - `definitions=N` N definitions of 12 KB, each of them new
//! - `threads=N` N threads that do not exist, with the longest names
//! - `rings` every ring full of slots that were never written
//! - `counters` the largest possible counts
//! - `names` names full of control sequences, in events that a report shows
//! - `oom` the same, and an out-of-memory error
//! - `paths=A:B` native frames in objects with these paths
//! - `live=N` N allocations of PyTorch that are never freed
//! - `driver=N` N allocations of the driver that are never freed
//! - `forever` writes into many rings and ignores all messages
//!
//! Also: `say=TEXT`, `wait` (for a line on stdin), `sleep=MS`, `daemon` (continues as its own process), `exit=CODE`.

use std::io::{BufRead, Write};
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use memtrace_trace::clock;
use memtrace_trace::definition::{Definition, LabelOrigin, NoticeStatus, TensorKind};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use memtrace_trace::options::{ENV, Options};
use memtrace_trace::shm::handshake::{Hello, address, recv_fd};
use memtrace_trace::shm::layout::{RING_COUNT, RING_SLOTS};
use memtrace_trace::shm::ring::Producer;
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::sync::Ordering;

/// Control sequences that a terminal would obey, characters that would break a line or a JSON text, and commands for CI
/// services.
const EVIL: &str = "\x1b]0;owned\x07\x1b[2J\u{9b}31m\u{202e}\r\n\"\\\u{7f}\n::error::owned ##[group]x ##vso[task.z]y";

fn connect() -> Option<OwnedFd> {
    let options = std::env::var(ENV).ok().and_then(|v| Options::parse(&v)).expect("run under memtrace");
    let (name, len) = address(&options.token).expect("an address");
    // SAFETY: `socket` returns a descriptor that nobody else owns, and `name` is a live address of `len` bytes.
    unsafe {
        let socket = OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0));
        (libc::connect(socket.as_raw_fd(), (&raw const name).cast(), len) == 0).then_some(socket)
    }
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> bool {
    // SAFETY: `bytes` is live for the duration of the call, and its length is passed with it.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    sent == bytes.len() as isize
}

fn attach(generation: u32) -> Option<Segment> {
    let socket = connect()?;
    if !send(&socket, &Hello::new(generation).to_bytes()) {
        return None;
    }
    Segment::map(recv_fd(socket.as_fd()).ok()?.as_fd()).ok()
}

/// Sends the hello with unrequested descriptors attached.
fn send_gifts(socket: &OwnedFd) {
    const GIFTS: usize = 64;
    let hello = Hello::new(0).to_bytes();
    let gifts = [0 as RawFd; GIFTS];
    let mut control = [0u64; 64];
    let mut io = libc::iovec { iov_base: hello.as_ptr().cast_mut().cast(), iov_len: hello.len() };
    // SAFETY: the message points to live locals, and the control data that is written fits into `control`.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &mut io;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of_val(&gifts) as u32) as _;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(size_of_val(&gifts) as u32) as _;
        std::ptr::copy_nonoverlapping(gifts.as_ptr(), libc::CMSG_DATA(head).cast(), GIFTS);
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL);
    }
}

/// Forks; returns true in the child.
fn fork() -> bool {
    // SAFETY: this program has only one thread wherever it forks, so the child inherits no lock of another thread.
    unsafe { libc::fork() == 0 }
}

/// Sends a hello over the connection of a process that is already dead.
fn ghost() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    if fork() {
        // The child connects, hands its connection over and ends.
        let socket = connect().expect("the launcher");
        memtrace_trace::shm::handshake::send_fd(theirs.as_fd(), socket.as_fd()).expect("sent");
        std::process::exit(0);
    }
    let socket = recv_fd(ours.as_fd()).expect("a connection");
    // SAFETY: `wait` accepts a null status pointer. It waits for the child that this function forked.
    unsafe { libc::wait(std::ptr::null_mut()) };
    let sent = send(&socket, &Hello::new(0).to_bytes());
    println!("ghost {}", if sent && recv_fd(socket.as_fd()).is_ok() { "served" } else { "refused" });
}

fn event(seq: u64) -> Event {
    Event {
        seq,
        ticks: clock::now(),
        addr: 0x7000_0000_0000 + seq * 512,
        size: 512,
        stack: StackId(1),
        source: Source::Torch,
        action: Action::Alloc,
        device: 0,
        ..Event::EMPTY
    }
}

/// A producer for a ring, whoever owns the ring.
fn ring(segment: &Segment, index: usize) -> Producer<'_> {
    segment.header().rings_used.0.fetch_max(index as u32 + 1, Ordering::AcqRel);
    Producer::new(segment.ring(index).expect("a ring"))
}

fn put(producer: &mut Producer<'_>, event: &Event) {
    while producer.write(&event.to_slot()).is_err() {
        std::thread::yield_now();
    }
    producer.publish();
}

fn define(producer: &mut Producer<'_>, definition: &Definition<'_>) {
    let mut bytes = Vec::new();
    definition.encode(&mut bytes);
    while producer.write_definition(&bytes).is_err() {
        std::thread::yield_now();
    }
}

/// Skips the first sequence number, so that every later event has to wait.
fn window(segment: &Segment) {
    segment.header().next_seq.0.store(200_001, Ordering::Release);
    let mut producer = ring(segment, 1);
    (2..=200_000).for_each(|seq| put(&mut producer, &event(seq)));
}

fn jumps(segment: &Segment) {
    segment.header().next_seq.0.store(u64::MAX, Ordering::Release);
    let mut producer = ring(segment, 1);
    for power in 1..64 {
        put(&mut producer, &event(1 << power));
        put(&mut producer, &event(u64::MAX - (1 << power)));
    }
}

fn ids(segment: &Segment) {
    let mut producer = ring(segment, 1);
    for id in (1..=64u32).map(|n| n * ((1 << 20) - 1)) {
        define(
            &mut producer,
            &Definition::Frame { id: FrameId(id), name: "f", qualname: "f", filename: "f.py", line: 1, first_line: 1 },
        );
        define(&mut producer, &Definition::Stack { id: StackId(id), parent: StackId::NONE, frame: FrameId(id) });
        define(
            &mut producer,
            &Definition::Context { id: ContextId(id), node: "n", forward: StackId::NONE, module: ContextId::NONE },
        );
        define(&mut producer, &Definition::Module { id: ModuleId(id), path: "/p", build_id: "" });
        define(&mut producer, &Definition::NativeFrame { id: FrameId(id), module: ModuleId(id), address: 1 });
    }
}

fn texts(segment: &Segment) {
    let mut producer = ring(segment, 1);
    let long = "x".repeat(15_000);
    for n in 0..2000 {
        let text = format!("{n} {long}");
        define(&mut producer, &Definition::Notice { topic: "t", text: &text, status: NoticeStatus::Remark });
    }
    // Strings and definitions that continue beyond the end, and a slot that announces a definition of 2^60 bytes.
    for bytes in
        [&[1, 255, 255, 255, 255, 255, 255, 255, 255, 127][..], &[8, 200, 1, 120], &[8, 3, 120, 1, 255], &[0xff; 600]]
    {
        while producer.write_definition(bytes).is_err() {
            std::thread::yield_now();
        }
    }
    producer.write(&[1 << 60, 0, 0, 0, 0, 0, 2, 0]).expect("room");
    producer.publish();
}

fn definitions(segment: &Segment, count: u32) {
    let mut producer = ring(segment, 1);
    let name = "n".repeat(4000);
    for id in 1..=count {
        let frame = Definition::Frame {
            id: FrameId(id),
            name: &name,
            qualname: &name,
            filename: &name,
            line: id,
            first_line: 1,
        };
        define(&mut producer, &frame);
    }
}

fn threads(segment: &Segment, count: u32) {
    let mut producer = ring(segment, 1);
    let name = "t".repeat(15_000);
    for tid in 1..=count {
        define(
            &mut producer,
            &Definition::Thread { id: ThreadId::NONE, tid, name: if tid % 100 == 0 { &name } else { "t" } },
        );
        put(&mut producer, &event(segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed)));
    }
}

fn rings(segment: &Segment) {
    segment.header().rings_used.0.store(u32::MAX, Ordering::Release);
    for header in segment.ring_headers() {
        header.tail.0.store(RING_SLOTS as u64, Ordering::Release);
    }
}

fn names(segment: &Segment) {
    let mut producer = ring(segment, 1);
    define(&mut producer, &Definition::Thread { id: ThreadId::NONE, tid: 1, name: EVIL });
    define(&mut producer, &Definition::Module { id: ModuleId(1), path: &format!("/lib/{EVIL}.so"), build_id: EVIL });
    let (name, file) = (format!("f{EVIL}"), format!("/home/{EVIL}/train.py"));
    define(
        &mut producer,
        &Definition::Frame { id: FrameId(1), name: &name, qualname: &name, filename: &file, line: 7, first_line: 1 },
    );
    define(&mut producer, &Definition::NativeFrame { id: FrameId(2), module: ModuleId(1), address: 9 });
    define(&mut producer, &Definition::Stack { id: StackId(1), parent: StackId::NONE, frame: FrameId(1) });
    define(&mut producer, &Definition::Stack { id: StackId(2), parent: StackId(1), frame: FrameId(2) });
    define(
        &mut producer,
        &Definition::Context { id: ContextId(1), node: EVIL, forward: StackId(1), module: ContextId::NONE },
    );
    define(
        &mut producer,
        &Definition::Device { ordinal: 0, name: EVIL, total: 1 << 33, used_before: 1 << 20, pci: EVIL },
    );
    define(&mut producer, &Definition::Notice { topic: EVIL, text: EVIL, status: NoticeStatus::Remark });
    define(&mut producer, &Definition::Label { id: 1, origin: LabelOrigin::Nvtx, text: EVIL });
    define(&mut producer, &Definition::NnCall { id: ContextId(2), caller: ContextId::NONE, object: 7, class: EVIL });
    define(&mut producer, &Definition::NnName { object: 7, seq: 1, class: EVIL, name: EVIL });
    let next = || segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed);
    let range = Event { addr: 1, size: 0, ..event(next()) };
    put(&mut producer, &Event { action: Action::RangeStart, ..range });
    for n in 0..100 {
        let (address, seq) = ((1 << 40) + (u64::from(n) << 20), next());
        let event = Event {
            size: 1 << 20,
            module: ModuleId(1),
            context: ContextId(1 + n % 3 / 2),
            stack: StackId(1 + n % 2),
            ..event(seq)
        };
        put(&mut producer, &Event { addr: address, ..event });
        let (kind, seq) = (TensorKind::Parameter, seq + 1);
        define(&mut producer, &Definition::TensorName { address, seq, kind, name: EVIL, shape: EVIL });
        define(&mut producer, &Definition::Holder { address, seq, path: EVIL, shape: EVIL });
    }
    put(&mut producer, &Event { action: Action::RangeEnd, seq: next(), ..range });
}

/// An out-of-memory error after [`names`], of which the stack is known.
fn oom(segment: &Segment) {
    names(segment);
    let seq = segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed);
    put(&mut ring(segment, 1), &Event { action: Action::Oom, size: 1 << 40, addr: 1 << 20, ..event(seq) });
}

fn paths(segment: &Segment, list: &str) {
    let mut producer = ring(segment, 1);
    for (id, path) in (1..).zip(list.split(':')) {
        define(&mut producer, &Definition::Module { id: ModuleId(id), path, build_id: "" });
        define(&mut producer, &Definition::NativeFrame { id: FrameId(id), module: ModuleId(id), address: 0x1000 });
        define(&mut producer, &Definition::Stack { id: StackId(id), parent: StackId::NONE, frame: FrameId(id) });
        let seq = segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed);
        put(&mut producer, &Event { stack: StackId(id), ..event(seq) });
    }
}

fn live(segment: &Segment, count: u64, source: Source) {
    let mut producer = ring(segment, 1);
    for _ in 0..count {
        let event = event(segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed));
        put(&mut producer, &Event { source, ..event });
    }
}

/// Listens in place of a launcher.
fn squat(token: &str) {
    let address = <SocketAddr as SocketAddrExt>::from_abstract_name(format!("memtrace-{token}"));
    let listener = address.and_then(|a| UnixListener::bind_addr(&a)).expect("the name");
    println!("listening");
    std::io::stdout().flush().expect("stdout");
    let (mut caller, _) = listener.accept().expect("a caller");
    let mut reply = Vec::new();
    // A traced process waits for our answer, so a short time is enough to receive its message.
    caller.set_read_timeout(Some(Duration::from_millis(300))).expect("a time limit");
    let _ = std::io::Read::read_to_end(&mut caller, &mut reply);
    println!("received {}", reply.len());
}

/// Writes as many events as possible into a few rings, forever.
fn forever(segment: &Segment) -> ! {
    let mut producers: Vec<_> = (1..RING_COUNT.min(64)).map(|index| ring(segment, index)).collect();
    loop {
        for producer in &mut producers {
            for _ in 0..256 {
                let seq = segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed);
                let action = if seq.is_multiple_of(2) { Action::FreeCompleted } else { Action::Alloc };
                if producer.write(&Event { action, addr: 1 << 40, ..event(seq) }.to_slot()).is_err() {
                    break;
                }
            }
            producer.publish();
        }
    }
}

fn main() {
    let mut kept = Vec::new();
    for word in std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()) {
        let (key, value) = word.split_once('=').unwrap_or((&word, ""));
        let number = || value.parse::<u64>().unwrap_or_else(|_| panic!("{word}: not a number"));
        let segment = || attach(0).expect("a segment");
        match key {
            "silent" => kept.extend((0..number()).filter_map(|_| connect())),
            "garbage" => (0..number()).for_each(|_| drop(connect().filter(|socket| send(socket, &[0xa5; 65_536])))),
            "half" => kept.extend((0..number()).filter_map(|_| {
                let socket = connect()?;
                send(&socket, &Hello::new(0).to_bytes()[..7]).then_some(socket)
            })),
            "gifts" => (0..number()).for_each(|_| drop(connect().inspect(send_gifts))),
            "flood" => {
                let (start, time) = (Instant::now(), Duration::from_millis(number()));
                while start.elapsed() < time {
                    drop(connect());
                }
            }
            "images" => (0..number()).for_each(|n| drop(attach(n as u32))),
            "ghost" => ghost(),
            "ask" => println!("{}", if attach(0).is_some() { "served" } else { "refused" }),
            "squat" => squat(value),
            "live" => live(&segment(), number(), Source::Torch),
            "driver" => live(&segment(), number(), Source::Driver),
            "windows" => {
                for _ in 0..number() {
                    if fork() {
                        window(&segment());
                        std::thread::sleep(Duration::from_millis(700));
                        std::process::exit(0);
                    }
                }
                // SAFETY: `wait` accepts a null status pointer. It waits for children of this process.
                while unsafe { libc::wait(std::ptr::null_mut()) } > 0 {}
            }
            "jumps" => jumps(&segment()),
            "ids" => ids(&segment()),
            "texts" => texts(&segment()),
            "definitions" => definitions(&segment(), number() as u32),
            "threads" => threads(&segment(), number() as u32),
            "rings" => rings(&segment()),
            "counters" => {
                let segment = segment();
                put(&mut ring(&segment, 1), &event(segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed)));
                segment.header().counters.0.iter().for_each(|counter| counter.store(u64::MAX, Ordering::Relaxed));
            }
            "names" => names(&segment()),
            "oom" => oom(&segment()),
            "exit" => std::process::exit(number() as i32),
            "paths" => paths(&segment(), value),
            "forever" => forever(&segment()),
            "say" => println!("{value}"),
            "wait" => drop(std::io::stdin().lock().read_line(&mut String::new())),
            "sleep" => std::thread::sleep(Duration::from_millis(number())),
            "daemon" => {
                if !fork() {
                    std::process::exit(0);
                }
                // SAFETY: the path is a NUL-terminated literal, and only descriptors of this process are replaced.
                unsafe {
                    libc::setsid();
                    let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
                    for fd in 0..3 {
                        libc::dup2(null, fd);
                    }
                }
            }
            other => panic!("{other}?"),
        }
        std::io::stdout().flush().expect("stdout");
    }
}
