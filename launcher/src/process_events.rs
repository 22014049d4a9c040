//! The kernel's reports of every fork, exec, change of a name, and exit (proc connector, linux/cn_proc.h).
//!
//! The reports are complete and cost a process about a microsecond at each fork, exec and exit. The kernel sends them
//! to root, and since Linux 6.6 to every user, but only outside containers: in the first network and pid namespaces.
//! They are about all processes of the machine.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{CONNECTOR, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, send, socket_with, sockopt,
};

/// The index and the value of the proc connector (`CN_IDX_PROC`, `CN_VAL_PROC` of linux/connector.h).
const PROC: u32 = 1;
/// `PROC_CN_MCAST_LISTEN` of linux/cn_proc.h.
const LISTEN: u32 = 1;
/// `NLMSG_DONE` of linux/netlink.h.
const DONE: u16 = 3;
/// The size of `struct nlmsghdr`, and of that with `struct cn_msg` behind it, in bytes.
const NETLINK_HEADER: usize = 16;
const HEADERS: usize = NETLINK_HEADER + 20;
/// The kinds of reports in `struct proc_event`. The first one answers the request.
const ANSWER: u32 = 0;
const FORK: u32 = 1;
const EXEC: u32 = 2;
const NAME: u32 = 0x200;
const EXIT: u32 = 0x8000_0000;
/// The largest message of the proc connector is 76 bytes long.
const MAX_MESSAGE: usize = 256;
/// The requested size of the receive buffer in bytes, for about 5,000 reports.
const BUFFER: usize = 4 << 20;

/// A report about processes. Ids are those of processes in the launcher's pid namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessEvent {
    /// `parent` has created the process `child`.
    Fork { parent: u32, child: u32 },
    /// The process executes another program.
    Exec { pid: u32 },
    /// The first thread of the process has set its name.
    Name { pid: u32, name: [u8; 16] },
    /// The first thread of the process has ended.
    Exit { pid: u32 },
    /// Reports were lost because the buffer was full.
    Gap,
}

/// The subscription to the kernel's reports.
#[derive(Debug)]
pub(crate) struct ProcessEvents(OwnedFd);

impl ProcessEvents {
    /// Subscribes to the reports. `None` if the kernel does not send them to this process.
    pub(crate) fn subscribe() -> Option<ProcessEvents> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(CONNECTOR)).ok()?;
        bind(&socket, &SocketAddrNetlink::new(0, PROC)).ok()?;
        // The kernel limits the size to that of net.core.rmem_max. A full buffer is reported.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER);
        send(&socket, &request(), SendFlags::empty()).ok()?;
        let events = ProcessEvents(socket);
        // The kernel answers the request while it is sent. Reports may already stand before the answer.
        loop {
            match events.receive() {
                Ok(Message::Answer { error: 0 }) => return Some(events),
                Ok(Message::Answer { .. }) | Err(_) => return None,
                Ok(Message::Event(_) | Message::Other) => {}
            }
        }
    }

    /// The next report that has arrived. `None` if there is none.
    pub(crate) fn next(&self) -> Option<ProcessEvent> {
        loop {
            match self.receive() {
                Ok(Message::Event(event)) => return Some(event),
                Ok(Message::Answer { .. } | Message::Other) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => return Some(ProcessEvent::Gap),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }

    fn receive(&self) -> io::Result<Message> {
        let mut buffer = [0; MAX_MESSAGE];
        let (size, _, sender) = recvfrom(&self.0, &mut buffer, RecvFlags::empty())?;
        // Any process may send a message to this socket. The kernel's have the address 0.
        let is_from_kernel =
            sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok()).is_some_and(|s| s.pid() == 0);
        Ok(if is_from_kernel { parse(buffer.get(..size).unwrap_or_default()) } else { Message::Other })
    }
}

impl AsFd for ProcessEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A message of the proc connector.
#[derive(PartialEq, Eq, Debug)]
enum Message {
    /// The kernel's answer to the request. An error is an `errno`.
    Answer {
        error: u32,
    },
    Event(ProcessEvent),
    Other,
}

/// The request for reports: `struct nlmsghdr`, `struct cn_msg` and `enum proc_cn_mcast_op`.
fn request() -> [u8; HEADERS + 4] {
    let mut bytes = [0; HEADERS + 4];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &(HEADERS as u32 + 4).to_ne_bytes());
    put(4, &DONE.to_ne_bytes());
    put(NETLINK_HEADER, &PROC.to_ne_bytes());
    put(NETLINK_HEADER + 4, &PROC.to_ne_bytes());
    // The length of what follows `struct cn_msg`.
    put(NETLINK_HEADER + 16, &4u16.to_ne_bytes());
    put(HEADERS, &LISTEN.to_ne_bytes());
    bytes
}

/// Parses `struct nlmsghdr`, `struct cn_msg` and `struct proc_event`: kind, CPU, time, and the process ids.
fn parse(message: &[u8]) -> Message {
    let number = |at: usize| message.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    if (number(NETLINK_HEADER), number(NETLINK_HEADER + 4)) != (Some(PROC), Some(PROC)) {
        return Message::Other;
    }
    let body = HEADERS + 16;
    let [first, second, third, fourth] = [0, 4, 8, 12].map(|at| number(body + at));
    match (number(HEADERS), first, second, third, fourth) {
        (Some(ANSWER), Some(error), ..) => Message::Answer { error },
        // Thread id and process id of the parent, then of the child. A new thread has another thread id.
        (Some(FORK), _, Some(parent), Some(thread), Some(child)) if thread == child => {
            Message::Event(ProcessEvent::Fork { parent, child })
        }
        (Some(EXEC), _, Some(pid), ..) => Message::Event(ProcessEvent::Exec { pid }),
        (Some(NAME), Some(thread), Some(pid), ..) if thread == pid => {
            let name = message.get(body + 8..body + 24).and_then(|name| name.try_into().ok());
            name.map_or(Message::Other, |name| Message::Event(ProcessEvent::Name { pid, name }))
        }
        (Some(EXIT), Some(thread), Some(pid), ..) if thread == pid => Message::Event(ProcessEvent::Exit { pid }),
        _ => Message::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    use rustix::event::{PollFd, PollFlags};

    fn message(kind: u32, numbers: [u32; 4]) -> Vec<u8> {
        let mut bytes = request()[..HEADERS].to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 12]);
        numbers.iter().for_each(|number| bytes.extend(number.to_ne_bytes()));
        bytes
    }

    #[test]
    fn messages_are_parsed_and_any_prefix_is_harmless() {
        let event = |kind, numbers| parse(&message(kind, numbers));
        assert_eq!(event(FORK, [10, 10, 11, 11]), Message::Event(ProcessEvent::Fork { parent: 10, child: 11 }));
        assert_eq!(event(FORK, [10, 10, 11, 10]), Message::Other, "a thread");
        assert_eq!(event(EXEC, [12, 11, 0, 0]), Message::Event(ProcessEvent::Exec { pid: 11 }));
        assert_eq!(event(EXIT, [11, 11, 0, 17]), Message::Event(ProcessEvent::Exit { pid: 11 }));
        assert_eq!(event(EXIT, [12, 11, 0, 17]), Message::Other, "a thread");
        assert_eq!(event(ANSWER, [1, 0, 0, 0]), Message::Answer { error: 1 });
        let name = |numbers, name: &[u8]| parse(&[&message(NAME, numbers)[..HEADERS + 24], name].concat());
        let named = ProcessEvent::Name { pid: 11, name: *b"python\0\0\0\0\0\0\0\0\0\0" };
        assert_eq!(name([11, 11, 0, 0], b"python\0\0\0\0\0\0\0\0\0\0"), Message::Event(named));
        assert_eq!(name([12, 11, 0, 0], b"python\0\0\0\0\0\0\0\0\0\0"), Message::Other, "a thread");
        assert_eq!(name([11, 11, 0, 0], b"short"), Message::Other);
        assert_eq!(event(4, [1, 1, 0, 0]), Message::Other);
        for len in 0..HEADERS + 32 {
            parse(&message(FORK, [1, 1, 2, 2])[..len]);
        }
    }

    #[test]
    #[expect(clippy::disallowed_macros, reason = "a test says that it was skipped")]
    fn every_child_is_reported() {
        let Some(events) = ProcessEvents::subscribe() else {
            eprintln!("skipped: the kernel reports no processes here (container, or a user before Linux 6.6)");
            return;
        };
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let mut seen = Vec::new();
        while seen.last() != Some(&ProcessEvent::Exit { pid }) {
            // The report of the end may come after the parent has seen that end.
            let Some(event) = events.next() else {
                rustix::event::poll(&mut [PollFd::new(&events, PollFlags::IN)], None).unwrap();
                continue;
            };
            let is_own = match event {
                ProcessEvent::Fork { child, .. } => child == pid,
                ProcessEvent::Exec { pid: other } | ProcessEvent::Exit { pid: other } => other == pid,
                ProcessEvent::Name { .. } | ProcessEvent::Gap => false,
            };
            seen.extend(is_own.then_some(event));
        }
        let parent = std::process::id();
        let expected =
            [ProcessEvent::Fork { parent, child: pid }, ProcessEvent::Exec { pid }, ProcessEvent::Exit { pid }];
        assert_eq!(seen, expected);
    }
}
