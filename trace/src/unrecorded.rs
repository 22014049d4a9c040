//! How a process reports that it cannot record: with a symbolic link in the run folder.
//!
//! The library makes the link when an event is lost because the launcher cannot be reached. Creating a link needs no
//! file descriptor, no connection, no memory and no space for data, so it works in another network namespace, under a
//! limit on the address space and after the launcher has ended. The link leads nowhere: its target is the report.
//!
//! The name is `PID-ID.unrecorded`, where ID distinguishes images of one process. The target is
//! `REASON EVENTS PROGRAM`. Both are from an untrusted process.

use crate::named;

/// The extension of the links.
pub const EXTENSION: &str = "unrecorded";
/// The maximum length of a program's path in a report, in bytes.
const MAX_PROGRAM: usize = 1024;

named! {
    /// Why the library cannot record. The names are those in a link.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub enum Reason {
        /// The recording would take too much of the address space that a limit leaves.
        AddressSpace => "address-space",
        /// A seccomp filter forbids a call that the recording needs.
        Seccomp => "seccomp",
        /// Nobody listens on the launcher's socket.
        NoListener => "no-listener",
        /// The launcher did not answer in time.
        NoAnswer => "no-answer",
        /// The kernel refused memory or a file descriptor.
        NoResources => "no-resources",
    }
}

impl Reason {
    /// The reason in reports.
    pub const fn text(self) -> &'static str {
        match self {
            Reason::AddressSpace => "its address space limit (ulimit -v) leaves no space for the recording",
            Reason::Seccomp => "a seccomp filter prevents its connection to the launcher",
            Reason::NoListener => "it cannot reach the launcher, which has ended or is in another network namespace",
            Reason::NoAnswer => "the launcher did not answer in time",
            Reason::NoResources => "it had no file descriptor or no memory left for the recording",
        }
    }
}

/// The report of one process image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unrecorded {
    /// The process id as the process itself sees it.
    pub pid: u32,
    /// Distinguishes images of one process.
    pub id: u64,
    /// Why it cannot record.
    pub reason: Reason,
    /// The number of events that it has lost at least.
    pub events: u64,
    /// The path with which the program was started.
    pub program: String,
}

impl Unrecorded {
    /// The name of the link.
    pub fn name(&self) -> String {
        format!("{}-{:x}.{EXTENSION}", self.pid, self.id)
    }

    /// The target of the link.
    pub fn target(&self) -> String {
        let end = (0..=MAX_PROGRAM.min(self.program.len())).rev().find(|at| self.program.is_char_boundary(*at));
        let program = self.program.get(..end.unwrap_or(0)).unwrap_or_default();
        format!("{} {} {program}", self.reason.name(), self.events)
    }

    /// Parses a link. `None` if it is not such a report.
    pub fn parse(name: &str, target: &str) -> Option<Unrecorded> {
        let (pid, id) = name.strip_suffix(EXTENSION)?.strip_suffix('.')?.split_once('-')?;
        let mut words = target.splitn(3, ' ');
        let reason = Reason::from_name(words.next()?)?;
        let events = words.next()?.parse().ok()?;
        let program = words.next()?.to_owned();
        Some(Unrecorded { pid: pid.parse().ok()?, id: u64::from_str_radix(id, 16).ok()?, reason, events, program })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_round_trip() {
        for reason in Reason::ALL {
            let program = "/opt/my programs/train é".to_owned();
            let report = Unrecorded { pid: 12, id: u64::MAX, reason, events: 7, program };
            assert_eq!(Unrecorded::parse(&report.name(), &report.target()), Some(report));
        }
    }

    #[test]
    fn a_long_program_is_cut() {
        let program = "é".repeat(MAX_PROGRAM);
        let report = Unrecorded { pid: 1, id: 0, reason: Reason::Seccomp, events: u64::MAX, program };
        let read = Unrecorded::parse(&report.name(), &report.target()).unwrap();
        assert_eq!(read.program.len(), MAX_PROGRAM);
    }

    #[test]
    fn other_links_are_refused() {
        for (name, target) in [
            ("1-2.unrecorded", "/etc/passwd"),
            ("1-2.unrecorded", "seccomp"),
            ("1-2.unrecorded", "seccomp x program"),
            ("1-2.unrecorded", "what 1 program"),
            ("1.unrecorded", "seccomp 1 program"),
            ("x-2.unrecorded", "seccomp 1 program"),
            ("1-2.mtr", "seccomp 1 program"),
        ] {
            assert_eq!(Unrecorded::parse(name, target), None, "{name} {target}");
        }
    }
}
