//! Requests of other memtrace commands ([`crate::control`]), from their arrival to the answer.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::writer::FileProgress;
use crate::control::Answer;

/// The maximum number of requests that wait for an answer. Beyond it, the oldest is closed without one.
const MAX_WAITING: usize = 64;
/// How long a request may wait. Whoever made it has given up by then.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// A request that waits until trace files are complete.
#[derive(Debug)]
struct Inquiry {
    socket: UnixStream,
    /// The number of the request. Files that were written out for it or a later one are complete.
    number: u64,
    files: Vec<Arc<FileProgress>>,
    expires: Instant,
}

/// The requests that wait for an answer.
#[derive(Default, Debug)]
pub(super) struct Inquiries {
    waiting: Vec<Inquiry>,
    last_number: u64,
}

impl Inquiries {
    /// Adds a request. It is answered once every file in `files` is complete. Returns its number.
    pub(super) fn add(&mut self, socket: UnixStream, files: Vec<Arc<FileProgress>>) -> u64 {
        if self.waiting.len() >= MAX_WAITING {
            self.waiting.remove(0);
        }
        self.last_number += 1;
        let (number, expires) = (self.last_number, Instant::now() + MAX_WAIT);
        self.waiting.push(Inquiry { socket, number, files, expires });
        number
    }

    /// Answers the requests whose files are complete. `answer` is computed only then.
    pub(super) fn answer(&mut self, answer: impl FnOnce() -> Answer) {
        let is_complete = |inquiry: &Inquiry| inquiry.files.iter().all(|file| file.is_complete(inquiry.number));
        if !self.waiting.iter().any(is_complete) {
            if let Some(now) = (!self.waiting.is_empty()).then(Instant::now) {
                self.waiting.retain(|inquiry| inquiry.expires > now);
            }
            return;
        }
        // An answer cannot fail to be serialized: it has only numbers and strings.
        let text = serde_json::to_vec(&answer()).unwrap_or_default();
        self.waiting.retain_mut(|inquiry| {
            let complete = is_complete(inquiry);
            if complete {
                // The socket does not block. Whoever does not read gets no whole answer.
                let _ = inquiry.socket.write_all(&text);
            }
            !complete
        });
    }

    /// Whether a request waits.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::atomic::Ordering;

    fn text(mut socket: UnixStream) -> String {
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        text
    }

    fn answer() -> Answer {
        Answer { pid: 7, folder: "/run".into(), processes: Vec::new() }
    }

    #[test]
    fn a_request_is_answered_when_its_files_are_complete() {
        let (mut inquiries, file) = (Inquiries::default(), Arc::new(FileProgress::default()));
        inquiries.answer(|| unreachable!("nobody has asked"));
        let (one, asks_one) = UnixStream::pair().unwrap();
        let (two, asks_two) = UnixStream::pair().unwrap();
        assert_eq!(inquiries.add(one, vec![Arc::clone(&file)]), 1);
        inquiries.answer(|| unreachable!("the file is not complete"));
        assert_eq!(inquiries.add(two, vec![Arc::clone(&file)]), 2);
        file.written_out.store(1, Ordering::Release);
        inquiries.answer(answer);
        assert_eq!(text(asks_one), r#"{"pid":7,"folder":"/run","processes":[]}"#);
        assert!(inquiries.is_waiting());
        // A file that cannot be written will never be more complete.
        file.failed.store(true, Ordering::Release);
        inquiries.answer(answer);
        assert!(text(asks_two).starts_with('{') && !inquiries.is_waiting());
    }

    #[test]
    fn too_many_requests_close_the_oldest() {
        let (mut inquiries, file) = (Inquiries::default(), Arc::new(FileProgress::default()));
        let mut asking = Vec::new();
        for _ in 0..=MAX_WAITING {
            let (socket, asks) = UnixStream::pair().unwrap();
            inquiries.add(socket, vec![Arc::clone(&file)]);
            asking.push(asks);
        }
        assert_eq!(text(asking.remove(0)), "");
        file.written_out.store(u64::MAX, Ordering::Release);
        inquiries.answer(answer);
        assert!(asking.into_iter().all(|asks| text(asks).starts_with('{')));
    }
}
