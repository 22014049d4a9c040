//! Why a process that asked to be recorded got no segment. Refusals are counted and reported when the run ends.

/// The reason of a refusal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum RefusalReason {
    /// The peer runs as another user.
    OtherUser,
    /// The peer's process id cannot be expressed in the launcher's pid namespace.
    OtherPidNamespace,
    /// The kernel returned no credentials.
    UnknownPeer,
    /// The connection was closed, or too many or too slow ones waited.
    IncompleteRequest,
    /// The request came from a library of another build.
    OtherBuild,
    /// The process ended before it got its segment.
    ProcessEnded,
    /// No file descriptor was available.
    NoDescriptors,
    /// The shared memory could not be created.
    NoSharedMemory,
    /// The run has the maximum number of processes or files.
    TooManyProcesses,
    /// One process had the maximum number of images.
    TooManyImages,
}

impl RefusalReason {
    const ALL: [RefusalReason; 10] = [
        RefusalReason::OtherUser,
        RefusalReason::OtherPidNamespace,
        RefusalReason::UnknownPeer,
        RefusalReason::IncompleteRequest,
        RefusalReason::OtherBuild,
        RefusalReason::ProcessEnded,
        RefusalReason::NoDescriptors,
        RefusalReason::NoSharedMemory,
        RefusalReason::TooManyProcesses,
        RefusalReason::TooManyImages,
    ];

    /// The reason in `run.json` and in messages.
    pub(crate) fn text(self) -> &'static str {
        match self {
            RefusalReason::OtherUser => "process of another user",
            RefusalReason::OtherPidNamespace => "process outside the launcher's pid namespace",
            RefusalReason::UnknownPeer => "unknown peer credentials",
            RefusalReason::IncompleteRequest => "incomplete request",
            RefusalReason::OtherBuild => "library of another memtrace build",
            RefusalReason::ProcessEnded => "process ended before the reply",
            RefusalReason::NoDescriptors => "no file descriptors left",
            RefusalReason::NoSharedMemory => "cannot create shared memory",
            RefusalReason::TooManyProcesses => "too many processes",
            RefusalReason::TooManyImages => "too many exec calls in one process",
        }
    }

    /// The action after which such a process is recorded.
    pub(crate) fn fix(self) -> &'static str {
        match self {
            RefusalReason::OtherUser => "run memtrace as that user: sudo -u USER memtrace -- COMMAND",
            RefusalReason::OtherPidNamespace => {
                "start memtrace inside the container, or start the container with --pid=host"
            }
            RefusalReason::OtherBuild => "unset MEMTRACE_LIBRARY, and nest only memtrace of the same version",
            RefusalReason::NoDescriptors => "raise the hard limit of open files: ulimit -Hn 65536",
            RefusalReason::NoSharedMemory => "raise the memory limit, and allow memfd_create in the sandbox",
            RefusalReason::TooManyProcesses | RefusalReason::TooManyImages => {
                "record a part of the job: put memtrace before the command of one worker"
            }
            RefusalReason::UnknownPeer | RefusalReason::IncompleteRequest | RefusalReason::ProcessEnded => {
                "run the command again; if this stays, report it with the output of memtrace doctor"
            }
        }
    }

    /// The reason with this text.
    pub(crate) fn from_text(text: &str) -> Option<RefusalReason> {
        RefusalReason::ALL.into_iter().find(|reason| reason.text() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_found_by_their_text() {
        assert!(RefusalReason::ALL.iter().all(|reason| RefusalReason::from_text(reason.text()) == Some(*reason)));
    }
}
