//! A program that records through shared memory as the preloaded library does, without a GPU. The launcher's tests run
//! it as the traced process. It reads the session from its environment.
//!
//! Arguments are words that are executed in order:
//! - `threads=N events=N` N threads write that many events each (default 1 and 1000); `rate=N` events a second in total
//! - `write` starts these threads and waits for them
//! - `gap=N` takes N sequence numbers and never uses them
//! - `define` writes one definition of each kind
//! - `native=PATH:ID:AT` makes later events come from this return address of an object with this build id
//! - `name=TEXT` renames the main thread
//! - `say=TEXT` prints a line on stdout
//! - `wait` waits for a line on stdin
//! - `churn=N` N threads, one after the other, write one event each on their own ring
//! - `corrupt=KIND` tail | kind | length | seq | header | random: overwrites parts of the segment
//! - `reattach` requests another segment, as after exec
//! - `linger` stops recording and runs until killed
//! - `kill` `abort` `exit=N` end the process

use std::io::{BufRead, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memtrace_trace::clock;
use memtrace_trace::definition::{Definition, NoticeStatus};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use memtrace_trace::options::{ENV, Options};
use memtrace_trace::shm::handshake::{Hello, address, recv_fd};
use memtrace_trace::shm::layout::SLOTS;
use memtrace_trace::shm::owner;
use memtrace_trace::shm::ring::{Full, Producer};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::sync::Ordering;

fn attach(generation: u32) -> (Arc<Segment>, OwnedFd) {
    let options = std::env::var(ENV).ok().and_then(|v| Options::parse(&v)).expect("run under memtrace");
    let (name, len) = address(&options.token).expect("an address");
    // SAFETY: `socket` returns a descriptor that nobody else owns, and `name` is a live address of `len` bytes.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        let socket = OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::connect(fd, (&raw const name).cast(), len), 0, "connect");
        let hello = Hello::new(generation).to_bytes();
        assert_eq!(libc::write(fd, hello.as_ptr().cast(), hello.len()), hello.len() as isize);
        socket
    };
    let fd = recv_fd(socket.as_fd()).expect("a segment");
    (Arc::new(Segment::map(fd.as_fd()).expect("a segment of this build")), fd)
}

fn gettid() -> u32 {
    // SAFETY: `gettid` has no arguments and always succeeds.
    unsafe { libc::gettid() as u32 }
}

fn thread_exists(tid: u32) -> bool {
    // SAFETY: `tgkill` takes integers; signal 0 only checks whether the thread exists.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) == 0 }
}

/// Claims a ring as a thread of the preloaded library does, and writes the owner's thread id. `None` when no ring is
/// free.
fn claim(segment: &Segment) -> Option<Producer<'_>> {
    let used = &segment.header().rings_used.0;
    let index = owner::claim(segment.ring_headers(), used, gettid(), thread_exists)?;
    let mut producer = Producer::new(segment.ring(index)?);
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let mut bytes = Vec::new();
    Definition::Thread { id: ThreadId::NONE, tid: gettid(), name: &name }.encode(&mut bytes);
    while producer.write_definition(&bytes) == Err(Full) {
        std::thread::yield_now();
    }
    Some(producer)
}

fn event(segment: &Segment, n: u64) -> Event {
    Event {
        seq: segment.header().next_seq.0.fetch_add(1, Ordering::Relaxed),
        ticks: clock::now(),
        addr: 0x7000_0000_0000 + (n % 1000) * 512,
        size: 512,
        stack: StackId(1),
        source: Source::Torch,
        action: if n.is_multiple_of(2) { Action::Alloc } else { Action::FreeCompleted },
        device: 0,
        ..Event::EMPTY
    }
}

/// Writes an event. Waits for a free slot until the launcher closes the segment.
fn put(segment: &Segment, producer: &mut Producer<'_>, event: &Event) {
    while producer.write(&event.to_slot()) == Err(Full) {
        if segment.header().closed.0.load(Ordering::Acquire) != 0 {
            return;
        }
        segment.header().counters.0[8].fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(50));
    }
    producer.publish();
}

fn write(segment: &Segment, events: u64, rate: Option<u64>) {
    let mut producer = claim(segment).expect("a free ring");
    let start = Instant::now();
    for n in 0..events {
        if let Some(rate) = rate
            && n % 64 == 0
        {
            while start.elapsed().as_nanos() < u128::from(n) * 1_000_000_000 / u128::from(rate) {
                std::thread::yield_now();
            }
        }
        let event = event(segment, n);
        put(segment, &mut producer, &event);
    }
}

fn define(segment: &Segment) {
    let mut producer = claim(segment).expect("a free ring");
    let all = [
        Definition::Frame { id: FrameId(1), name: "f", qualname: "A.f", filename: "train.py", line: 7, first_line: 3 },
        Definition::Stack { id: StackId(1), parent: StackId::NONE, frame: FrameId(1) },
        Definition::Context { id: ContextId(1), node: "MmBackward0", forward: StackId(1), module: ContextId::NONE },
        Definition::Module { id: ModuleId(1), path: "/lib/libcudart.so.13", build_id: "" },
        Definition::Pool { id: 1, pool: (0, 7) },
        Definition::Device { ordinal: 0, name: "H200", total: 1 << 37, used_before: 5 << 20, pci: "0000:01:00.0" },
        Definition::Notice { topic: "torch.tracker", text: "attached", status: NoticeStatus::Works },
        // Only the launcher may define threads, so this definition is refused.
        Definition::Thread { id: ThreadId(77), tid: 1, name: "forged" },
        Definition::Stack { id: StackId(u32::MAX), parent: StackId::NONE, frame: FrameId(1) },
    ];
    for definition in &all {
        let mut bytes = Vec::new();
        definition.encode(&mut bytes);
        producer.write_definition(&bytes).expect("room");
    }
    producer.write_definition(&[1, 200, 1]).expect("room");
}

fn define_native(segment: &Segment, place: &str) {
    let [path, build_id, address] = place.split(':').collect::<Vec<_>>()[..] else { panic!("native={place}?") };
    let address = u64::from_str_radix(address, 16).expect("an address");
    let mut producer = claim(segment).expect("a free ring");
    for definition in [
        Definition::Module { id: ModuleId(1), path, build_id },
        Definition::NativeFrame { id: FrameId(1), module: ModuleId(1), address },
        Definition::Stack { id: StackId(1), parent: StackId::NONE, frame: FrameId(1) },
    ] {
        let mut bytes = Vec::new();
        definition.encode(&mut bytes);
        producer.write_definition(&bytes).expect("room");
    }
}

fn corrupt(segment: &Segment, kind: &str) {
    let mut producer = claim(segment).expect("a free ring");
    let header = segment.ring_header(1).expect("ring 1");
    match kind {
        "tail" => header.tail.0.store(u64::MAX / 2, Ordering::Release),
        "kind" => {
            producer.write(&[u64::MAX; 8]).expect("room");
            producer.publish();
        }
        "length" => {
            producer.write(&[u64::MAX, 0, 0, 0, 0, 0, 2, 0]).expect("room");
            producer.publish();
        }
        "seq" => put(segment, &mut producer, &Event { seq: u64::MAX - 1, ..Event::EMPTY }),
        "header" => {
            segment.header().rings_used.0.store(u32::MAX, Ordering::Release);
            segment.header().next_seq.0.store(u64::MAX, Ordering::Release);
            put(segment, &mut producer, &Event { seq: u64::MAX / 2, ..Event::EMPTY });
        }
        "random" => {
            // Overwrite the whole header and the first rings repeatedly for one second.
            let base: *const u8 = std::ptr::from_ref(segment.header()).cast();
            let mut state = 0x9e37_79b9_7f4a_7c15u64;
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(1) {
                for _ in 0..10_000 {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let at = (state as usize % (SLOTS + (4 << 20))) & !7;
                    // SAFETY: the offset is aligned and inside the mapped segment. Both processes access that memory
                    // only through atomics.
                    let word = unsafe { &*base.add(at).cast::<std::sync::atomic::AtomicU64>() };
                    // Small numbers do more harm than large ones.
                    word.store(state >> (state % 64), Ordering::Relaxed);
                }
            }
        }
        other => panic!("corrupt={other}?"),
    }
}

fn main() {
    let (mut segment, mut fd) = attach(0);
    let (mut threads, mut events, mut rate) = (1u64, 1000u64, None);
    for word in std::env::args().skip(1) {
        let (key, value) = word.split_once('=').unwrap_or((&word, ""));
        let number = || value.parse::<u64>().unwrap_or_else(|_| panic!("{word}: not a number"));
        match key {
            "threads" => threads = number(),
            "events" => events = number(),
            "rate" => rate = Some(number()),
            "write" => std::thread::scope(|scope| {
                for i in 0..threads {
                    let segment = &segment;
                    let start = move || write(segment, events, rate.map(|r| r / threads));
                    std::thread::Builder::new()
                        .name(format!("producer-{i}"))
                        .spawn_scoped(scope, start)
                        .expect("a thread");
                }
            }),
            "gap" => {
                segment.header().next_seq.0.fetch_add(number(), Ordering::Relaxed);
            }
            "define" => define(&segment),
            "native" => define_native(&segment, value),
            "name" => {
                let name = std::ffi::CString::new(value).expect("no NUL");
                // SAFETY: `name` is a live, NUL-terminated C string for the duration of the call.
                unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
            }
            "say" => {
                println!("{value}");
                std::io::stdout().flush().expect("stdout");
            }
            "wait" => {
                std::io::stdin().lock().read_line(&mut String::new()).expect("stdin");
            }
            "churn" => {
                for n in 0..number() {
                    let segment = Arc::clone(&segment);
                    let work = move || loop {
                        if let Some(mut producer) = claim(&segment) {
                            let event = event(&segment, n);
                            return put(&segment, &mut producer, &event);
                        }
                        std::thread::yield_now();
                    };
                    std::thread::spawn(work).join().expect("a thread");
                }
            }
            "corrupt" => corrupt(&segment, value),
            "reattach" => (segment, fd) = attach(1),
            "linger" => loop {
                std::thread::park();
            },
            // SAFETY: `kill` takes two integers. The argument asks for this process's end.
            "kill" => unsafe {
                libc::kill(libc::getpid(), libc::SIGKILL);
            },
            "abort" => std::process::abort(),
            "exit" => std::process::exit(number() as i32),
            other => panic!("{other}?"),
        }
    }
    drop(fd);
}
