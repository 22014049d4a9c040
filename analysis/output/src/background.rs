//! A writer on its own thread: the next events are encoded while the system writes the previous ones. Writing to a file
//! takes about as long as encoding.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

/// The maximum number of buffers in flight, which bounds their memory.
const MAX_BUFFERS_IN_FLIGHT: usize = 4;

/// The writer and its thread.
pub(super) struct BackgroundWriter<'scope> {
    full: Option<SyncSender<Vec<u8>>>,
    empty: Receiver<Vec<u8>>,
    thread: Option<ScopedJoinHandle<'scope, io::Result<()>>>,
}

impl<'scope> BackgroundWriter<'scope> {
    /// Starts the thread that writes to `out`. Data that is not flushed before the drop can be lost.
    pub(super) fn new<W: Write + Send + 'scope>(
        scope: &'scope Scope<'scope, '_>,
        mut out: W,
    ) -> BackgroundWriter<'scope> {
        let (full, to_write) = sync_channel::<Vec<u8>>(MAX_BUFFERS_IN_FLIGHT);
        let (written, empty) = sync_channel::<Vec<u8>>(MAX_BUFFERS_IN_FLIGHT);
        let thread = scope.spawn(move || {
            for mut bytes in to_write {
                out.write_all(&bytes)?;
                bytes.clear();
                match written.try_send(bytes) {
                    // The buffer is not needed again.
                    Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
                }
            }
            out.flush()
        });
        BackgroundWriter { full: Some(full), empty, thread: Some(thread) }
    }

    /// Waits for the thread. Returns its result once, and `Ok` afterwards.
    fn join(&mut self) -> io::Result<()> {
        self.full = None;
        match self.thread.take().map(ScopedJoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Write for BackgroundWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut buffer = self.empty.try_recv().unwrap_or_default();
        buffer.extend_from_slice(bytes);
        if self.full.as_ref().is_some_and(|full| full.send(buffer).is_ok()) {
            return Ok(bytes.len());
        }
        // The thread has ended early, so an error occurred.
        Err(self.join().err().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }

    /// Waits until everything is written. Nothing can be written afterwards.
    fn flush(&mut self) -> io::Result<()> {
        self.join()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_arrives_in_order() {
        let mut out = Vec::new();
        let mut expected = Vec::new();
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(scope, &mut out);
            for i in 0..1000u32 {
                writer.write_all(&i.to_le_bytes()).unwrap();
                expected.extend_from_slice(&i.to_le_bytes());
            }
            writer.flush().unwrap();
        });
        assert_eq!(out, expected);
    }

    #[test]
    fn an_error_of_the_output_is_returned() {
        struct FullDisk(usize);
        impl Write for FullDisk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(scope, FullDisk(3));
            let mut write = || -> io::Result<()> {
                for _ in 0..100 {
                    writer.write_all(b"x")?;
                }
                writer.flush()
            };
            assert_eq!(write().unwrap_err().kind(), io::ErrorKind::StorageFull);
        });
    }
}
