//! Requests of other memtrace commands to the launcher of a running recording: which processes it records, and to write
//! out what they have published. They connect to the socket that the traced processes use too.
//!
//! The traced processes take no part in this. The messages are the same in every version of memtrace that has them, so
//! a newer `memtrace live` can read the recording of an older launcher.

use serde::{Deserialize, Serialize};

/// The length of a request, in bytes: that of the first message of a traced process.
pub(crate) const REQUEST_LEN: usize = size_of::<memtrace_trace::shm::handshake::Hello>();

/// The first bytes of every request. No build has this number.
const MAGIC: [u8; 8] = *b"memtrace";

/// A request to the launcher.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// Which processes are recorded, and where.
    Describe,
    /// The same, after all that these processes have published before is in their trace files.
    WriteOut,
}

impl Request {
    /// The bytes of the request.
    pub(crate) fn to_bytes(self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        let (magic, rest) = bytes.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        if let Some(kind) = rest.first_mut() {
            *kind = match self {
                Request::Describe => 1,
                Request::WriteOut => 2,
            };
        }
        bytes
    }

    /// Decodes a request. `None` if the bytes are something else.
    pub(crate) fn from_bytes(bytes: &[u8; REQUEST_LEN]) -> Option<Request> {
        [Request::Describe, Request::WriteOut].into_iter().find(|request| request.to_bytes() == *bytes)
    }
}

/// The answer to a request, as JSON. Readers ignore unknown fields.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The process id of the launcher.
    pub(crate) pid: u32,
    /// The absolute path of the run folder.
    pub(crate) folder: String,
    /// The processes that are being recorded now, by the start of their recording.
    pub(crate) processes: Vec<RecordedProcess>,
}

/// A process that is being recorded.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RecordedProcess {
    /// The process id.
    pub(crate) pid: u32,
    /// The name of its trace in the run folder.
    pub(crate) trace: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::shm::handshake::Hello;

    #[test]
    fn a_request_is_no_hello_and_a_hello_is_no_request() {
        for request in [Request::Describe, Request::WriteOut] {
            assert_eq!(Request::from_bytes(&request.to_bytes()), Some(request));
            assert_eq!(Hello::from_bytes(&request.to_bytes()), None);
        }
        assert_eq!(Request::from_bytes(&Hello::new(1).to_bytes()), None);
        assert_eq!(Request::from_bytes(&[0; REQUEST_LEN]), None);
    }
}
