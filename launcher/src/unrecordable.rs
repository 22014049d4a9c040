//! Unrecordable processes: processes of the command in which memtrace cannot record, each with the reason.
//!
//! `process_watch` finds them from outside. Where the library is loaded and cannot record, it reports that itself
//! (`memtrace_trace::unrecorded`).

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_analysis::load;
use memtrace_trace::unrecorded::{Reason, Unrecorded};

/// Why no event of a process can be recorded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Obstacle {
    OtherUser,
    StaticallyLinked,
    OtherMachine,
    PreloadRemoved,
    LibraryNotVisible,
    Privileged,
    SessionRemoved,
    NetworkNamespace,
    NoListener,
    Seccomp,
    AddressSpaceLimit,
    NoAnswer,
    NoResources,
}

impl Obstacle {
    /// All obstacles.
    const ALL: [Obstacle; 13] = [
        Obstacle::OtherUser,
        Obstacle::StaticallyLinked,
        Obstacle::OtherMachine,
        Obstacle::PreloadRemoved,
        Obstacle::LibraryNotVisible,
        Obstacle::Privileged,
        Obstacle::SessionRemoved,
        Obstacle::NetworkNamespace,
        Obstacle::NoListener,
        Obstacle::Seccomp,
        Obstacle::AddressSpaceLimit,
        Obstacle::NoAnswer,
        Obstacle::NoResources,
    ];

    /// The reason in `run.json` and in messages.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Obstacle::OtherUser => "it runs as another user",
            Obstacle::StaticallyLinked => load::STATICALLY_LINKED,
            Obstacle::OtherMachine => "it is a program for another machine, such as a 32-bit program",
            Obstacle::PreloadRemoved => "LD_PRELOAD in its environment does not name memtrace's library",
            Obstacle::LibraryNotVisible => "its file system does not contain memtrace's library (container or chroot)",
            Obstacle::Privileged => "its program has privileges (setuid, file capabilities)",
            Obstacle::SessionRemoved => "MEMTRACE_SESSION is not in its environment",
            Obstacle::NetworkNamespace => "it is in another network namespace (container)",
            Obstacle::NoListener => Reason::NoListener.text(),
            Obstacle::Seccomp => Reason::Seccomp.text(),
            Obstacle::AddressSpaceLimit => Reason::AddressSpace.text(),
            Obstacle::NoAnswer => Reason::NoAnswer.text(),
            Obstacle::NoResources => Reason::NoResources.text(),
        }
    }

    /// The action after which such a process is recorded.
    pub(crate) fn fix(self) -> &'static str {
        match self {
            Obstacle::OtherUser => "run memtrace as that user: sudo -u USER memtrace -- COMMAND",
            Obstacle::StaticallyLinked => "run a dynamically linked build of the program",
            Obstacle::OtherMachine => "run a 64-bit build of the program",
            Obstacle::PreloadRemoved => {
                "pass LD_PRELOAD and MEMTRACE_SESSION to it, or start memtrace there: env -i ... memtrace -- COMMAND"
            }
            Obstacle::LibraryNotVisible | Obstacle::NetworkNamespace => {
                "start memtrace inside the container, before its command"
            }
            Obstacle::NoListener => {
                "start memtrace inside the container; let the command end after the processes that it starts"
            }
            Obstacle::Privileged => "start memtrace from the privileged program: PROGRAM ... memtrace -- COMMAND",
            Obstacle::SessionRemoved => "pass MEMTRACE_SESSION to the process, together with LD_PRELOAD",
            Obstacle::Seccomp => "allow socket(AF_UNIX), connect, recvmsg and mmap in the seccomp filter",
            Obstacle::AddressSpaceLimit => "raise the limit: ulimit -v unlimited",
            Obstacle::NoAnswer => {
                "let memtrace run while the command runs: do not stop it, and leave it processor time"
            }
            Obstacle::NoResources => "raise the limits of open files and of memory: ulimit -n, ulimit -v",
        }
    }

    /// The obstacle of a process that has reported this reason while the launcher ran.
    fn of(reason: Reason) -> Obstacle {
        match reason {
            Reason::AddressSpace => Obstacle::AddressSpaceLimit,
            Reason::Seccomp => Obstacle::Seccomp,
            Reason::NoListener => Obstacle::NoListener,
            Reason::NoAnswer => Obstacle::NoAnswer,
            Reason::NoResources => Obstacle::NoResources,
        }
    }

    /// The obstacle with this text.
    pub(crate) fn from_text(text: &str) -> Option<Obstacle> {
        Obstacle::ALL.into_iter().find(|obstacle| obstacle.text() == text)
    }
}

/// A process of the command that cannot be recorded.
#[derive(Clone, Debug)]
pub(crate) struct UnrecordableProcess {
    /// Its process id in the launcher's pid namespace.
    pub(crate) pid: u32,
    /// The path of its executable.
    pub(crate) program: String,
    /// Why nothing can be recorded.
    pub(crate) obstacle: Obstacle,
    /// Whether it was seen with CUDA loaded. False when this is unknown.
    pub(crate) uses_cuda: bool,
    /// The number of events that it lost at least. 0 when this is unknown.
    pub(crate) lost_events: u64,
}

impl UnrecordableProcess {
    /// The entry of the process in `run.json`.
    pub(crate) fn entry(&self) -> load::UnrecordableProcess {
        load::UnrecordableProcess {
            pid: self.pid,
            program: self.program.clone(),
            reason: self.obstacle.text().to_owned(),
            uses_cuda: self.uses_cuda,
            lost_events: self.lost_events,
        }
    }
}

impl From<Unrecorded> for UnrecordableProcess {
    fn from(report: Unrecorded) -> UnrecordableProcess {
        UnrecordableProcess {
            pid: report.pid,
            program: report.program,
            obstacle: Obstacle::of(report.reason),
            uses_cuda: true,
            lost_events: report.events,
        }
    }
}

/// Joins the processes that were found from outside with those that reported themselves.
pub(crate) fn merge(found: Vec<UnrecordableProcess>, reports: Vec<Unrecorded>) -> Vec<UnrecordableProcess> {
    let has_reported = |pid| reports.iter().any(|report| report.pid == pid);
    let mut all: Vec<UnrecordableProcess> = found.into_iter().filter(|process| !has_reported(process.pid)).collect();
    all.extend(reports.into_iter().map(UnrecordableProcess::from));
    all
}

/// The processes by obstacle, each group as a text such as `python3 (7), python3 (8) and 2 more`.
pub(crate) fn by_obstacle(processes: &[UnrecordableProcess]) -> BTreeMap<Obstacle, String> {
    const SHOWN: usize = 3;
    let mut names: BTreeMap<Obstacle, Vec<String>> = BTreeMap::new();
    for process in processes {
        let name = Path::new(&process.program).file_name().map(|n| n.to_string_lossy().into_owned());
        let name = format!("{} ({})", name.unwrap_or_default(), process.pid);
        names.entry(process.obstacle).or_default().push(name);
    }
    let list = |names: Vec<String>| match names.len().saturating_sub(SHOWN) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ")),
    };
    names.into_iter().map(|(obstacle, names)| (obstacle, list(names))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_grouped_by_obstacle() {
        let process = |pid, obstacle| UnrecordableProcess {
            pid,
            program: "/usr/bin/python3".into(),
            obstacle,
            uses_cuda: true,
            lost_events: 0,
        };
        assert!(by_obstacle(&[]).is_empty());
        let all: Vec<UnrecordableProcess> =
            (1..=5).map(|pid| process(pid, Obstacle::Seccomp)).chain([process(9, Obstacle::OtherUser)]).collect();
        let groups: Vec<_> = by_obstacle(&all).into_iter().collect();
        let seccomp = "python3 (1), python3 (2), python3 (3) and 2 more";
        assert_eq!(groups, [(Obstacle::OtherUser, "python3 (9)".into()), (Obstacle::Seccomp, seccomp.into())]);
    }

    #[test]
    fn obstacles_are_found_by_their_text() {
        assert!(Obstacle::ALL.iter().all(|obstacle| Obstacle::from_text(obstacle.text()) == Some(*obstacle)));
    }

    #[test]
    fn a_report_replaces_what_was_found_from_outside() {
        let found = |pid| UnrecordableProcess {
            pid,
            program: "/bin/a".into(),
            obstacle: Obstacle::NetworkNamespace,
            uses_cuda: false,
            lost_events: 0,
        };
        let report = Unrecorded { pid: 7, id: 1, reason: Reason::Seccomp, events: 5, program: "/bin/a".into() };
        let all = merge(vec![found(6), found(7)], vec![report]);
        let facts: Vec<_> = all.iter().map(|p| (p.pid, p.obstacle, p.uses_cuda, p.lost_events)).collect();
        assert_eq!(facts, [(6, Obstacle::NetworkNamespace, false, 0), (7, Obstacle::Seccomp, true, 5)]);
    }
}
