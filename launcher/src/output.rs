//! Prints: the only module that writes to stdout and stderr, which `clippy.toml` enforces.
//!
//! Names of files, functions and threads, paths, and the words of the command line can contain anything
//! ([`memtrace_analysis::printable`]). So every text is made printable here, once more or for the first time, whoever
//! composed it. [`Printed`] lists the kinds of output. The output of a recorded program does not pass through memtrace.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};

use memtrace_analysis::printable;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// A standard stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// The kind of printed content, and so how it is made printable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Printed<'a> {
    /// Lines of text.
    Text(&'a str),
    /// Lines of text with the sequences of [`printable::STYLES`], which stay on a terminal.
    Styled(&'a str),
    /// A JSON text.
    Json(&'a str),
    /// Workflow commands of GitHub Actions, which [`is_annotation`] recognizes. Other lines are text.
    Annotations(&'a str),
    /// A file that the user requested on stdout: its bytes. On a terminal, its lines as text.
    File(&'a [u8]),
}

impl Stream {
    /// Whether a terminal shows it.
    pub(crate) fn is_terminal(self) -> bool {
        rustix::termios::isatty(self)
    }

    /// Writes output of the command as it is, as the command would have.
    pub(crate) fn pass_on(self, mut bytes: &[u8]) -> rustix::io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::write(self, bytes) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                // The file description of another process can be without blocking.
                Err(Errno::AGAIN) => _ = poll(&mut [PollFd::new(&self, PollFlags::OUT)], None)?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn write(self, bytes: &[u8]) -> io::Result<()> {
        #[expect(clippy::disallowed_methods, reason = "this is the module that prints")]
        match self {
            Stream::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Stream::Stderr => io::stderr().lock().write_all(bytes),
        }
    }
}

impl AsFd for Stream {
    /// The descriptor, to examine it and to pass it to another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        #[expect(clippy::disallowed_methods, reason = "nothing is written here")]
        match self {
            Stream::Stdout => rustix::stdio::stdout(),
            Stream::Stderr => rustix::stdio::stderr(),
        }
    }
}

impl<'a> Printed<'a> {
    /// The content as bytes, for a file.
    pub(crate) fn content(self) -> &'a [u8] {
        match self {
            Printed::Text(text) | Printed::Styled(text) | Printed::Json(text) | Printed::Annotations(text) => {
                text.as_bytes()
            }
            Printed::File(bytes) => bytes,
        }
    }

    /// The bytes for a stream, or for a terminal.
    fn bytes(self, is_terminal: bool) -> Vec<u8> {
        match self {
            Printed::Styled(text) if is_terminal => printable::styled_text(text, &printable::STYLES).into_bytes(),
            Printed::Text(text) | Printed::Styled(text) => printable::output_text(text).into_bytes(),
            Printed::Json(text) => printable::json(text.to_owned()).into_bytes(),
            Printed::Annotations(text) => {
                let line = |line| match is_annotation(line) {
                    true => line.to_owned(),
                    false => printable::output_line(line),
                };
                text.lines().map(|one| line(one) + "\n").collect::<String>().into_bytes()
            }
            Printed::File(bytes) if is_terminal => printable::output_text(&String::from_utf8_lossy(bytes)).into_bytes(),
            Printed::File(bytes) => bytes.to_owned(),
        }
    }
}

/// Whether a line is a workflow command of `memtrace check --github`, and no other command is in it.
fn is_annotation(line: &str) -> bool {
    let is_ours = ["::error ", "::notice "].iter().any(|start| line.starts_with(start));
    is_ours && printable::output_line(&line[2..]) == line[2..]
}

/// Prints on stdout. A closed pipe (`| head`) is not an error.
///
/// # Errors
///
/// Those of the system.
pub(crate) fn print(what: Printed<'_>) -> io::Result<()> {
    match Stream::Stdout.write(&what.bytes(Stream::Stdout.is_terminal())) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Prints on stderr. An error has no place where it could be reported.
pub(crate) fn print_to_stderr(what: Printed<'_>) {
    let _ = Stream::Stderr.write(&what.bytes(Stream::Stderr.is_terminal()));
}

/// Sends messages to the launcher that has started this process in the background, and reads the stream from a pipe.
pub(crate) fn pipe_to_launcher(stream: Stream) -> impl Write {
    struct Pipe(Stream);
    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.write(bytes).map(|()| bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    Pipe(stream)
}

/// Lets panics print through this module: the message of a panic can quote a name.
pub(crate) fn print_panics() {
    std::panic::set_hook(Box::new(|info| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let (place, text) = (info.location(), info.payload_as_str().unwrap_or("Box<dyn Any>"));
        let place = place.map_or_else(String::new, ToString::to_string);
        let backtrace = std::backtrace::Backtrace::capture();
        let backtrace = match backtrace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("{backtrace}\n"),
            _ => String::new(),
        };
        let text = format!("thread '{name}' panicked at {place}:\n{text}\n{backtrace}");
        print_to_stderr(Printed::Text(&text));
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(what: Printed<'_>, is_terminal: bool) -> String {
        String::from_utf8_lossy(&what.bytes(is_terminal)).into_owned()
    }

    #[test]
    fn every_kind_is_printable() {
        let hostile = "\x1b[1ma\x1b[2J\u{9b}\u{202e}b\n::error::c ##vso[d]\r\n";
        for is_terminal in [false, true] {
            let text = printed(Printed::Text(hostile), is_terminal);
            assert_eq!(text, "\u{fffd}[1ma\u{fffd}[2J\u{fffd}\u{fffd}b\n\u{fffd}::error::c ##vso\u{fffd}[d]\u{fffd}\n");
            let styled = printed(Printed::Styled(hostile), is_terminal);
            assert_eq!(styled, if is_terminal { text.replacen('\u{fffd}', "\x1b", 1) } else { text.clone() });
            assert_eq!(printed(Printed::Annotations("\x1b[2J::error ::x"), is_terminal), "\u{fffd}[2J::error ::x\n");
            assert_eq!(printed(Printed::Json("[\"\u{202e}##[x]\"]\n"), is_terminal), "[\"\\u202e##\\u005bx]\"]\n");
            let file = printed(Printed::File(hostile.as_bytes()), is_terminal);
            assert_eq!(file, if is_terminal { text } else { hostile.to_owned() });
        }
    }

    #[test]
    fn only_annotations_are_commands() {
        let own = "::error file=a.py,line=3,title=memtrace check::peak::high\n::notice title=memtrace check::x\n";
        assert_eq!(printed(Printed::Annotations(own), false), own);
        let others = "::stop-commands::x\n::error title=a::##[b]\n::notice title=\x1b[2J::b\n";
        let expected = "\u{fffd}::stop-commands::x\n\u{fffd}::error title=a::##\u{fffd}[b]\n\u{fffd}::notice \
                        title=\u{fffd}[2J::b\n";
        assert_eq!(printed(Printed::Annotations(others), false), expected);
    }
}
