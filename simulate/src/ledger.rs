//! The oracle: one JSON line for every allocation or free served, in the order of service.
//!
//! Lines are appended with one `write(2)` each to a file opened with `O_APPEND`, unbuffered, so what was served is on
//! record even if the process is killed the next moment, and several processes may share a file. A forked child opens
//! its own file where the path holds `%p`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;

/// Which interface was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// libcuda
    Driver,
    /// libcudart
    Runtime,
}

/// One served call, as the ledger tells it. What does not apply is None and left out of the line.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// The exported symbol's exact name.
    pub api: &'static str,
    /// Address (0 where none resulted); None for calls about a handle.
    pub addr: Option<u64>,
    /// Bytes; for a free those of the allocation, where it is known.
    pub size: Option<u64>,
    /// Device ordinal as the program counts.
    pub device: Option<usize>,
    /// The stream handle as the program gave it (2 for the per-thread default of a `_ptsz` call).
    pub stream: Option<u64>,
    /// Physical-memory, array or pool handle.
    pub handle: Option<u64>,
    /// Where in the physical memory a mapping begins.
    pub offset: Option<u64>,
    /// Bytes from row to row.
    pub pitch: Option<u64>,
    /// The flags argument.
    pub flags: Option<u64>,
}

impl Call {
    /// The call's own part of the line: everything but the number, the time and the process.
    pub fn fields(&self, layer: Layer, nested: bool, result: i32) -> String {
        let layer = match layer {
            Layer::Driver => "driver",
            Layer::Runtime => "runtime",
        };
        let mut text = format!("\"layer\":\"{layer}\",\"api\":\"{}\"", self.api);
        if nested {
            text.push_str(",\"nested\":true");
        }
        let numbers = [
            ("addr", self.addr),
            ("size", self.size),
            ("device", self.device.map(|d| d as u64)),
            ("stream", self.stream),
            ("handle", self.handle),
            ("offset", self.offset),
            ("pitch", self.pitch),
            ("flags", self.flags),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                let _ = write!(text, ",\"{name}\":{value}");
            }
        }
        let _ = write!(text, ",\"result\":{result}");
        text
    }
}

/// The ledger of this process.
#[derive(Debug)]
pub struct Ledger {
    template: Option<String>,
    open: Option<(u32, File)>,
    next: u64,
}

impl Ledger {
    /// A ledger at a path in which `%p` is the process id; None keeps none.
    pub fn new(template: Option<String>) -> Self {
        Ledger { template, open: None, next: 1 }
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.template.is_some()
    }

    /// The next number in the order of service.
    pub fn number(&mut self) -> u64 {
        let n = self.next;
        self.next += 1;
        n
    }

    /// Appends a line under a number.
    pub fn append(&mut self, number: u64, time_ns: u64, fields: &str) {
        let Some(template) = &self.template else { return };
        let pid = std::process::id();
        if self.open.as_ref().is_none_or(|(owner, _)| *owner != pid) {
            let path = template.replace("%p", &pid.to_string());
            match File::options().create(true).append(true).open(&path) {
                Ok(file) => self.open = Some((pid, file)),
                Err(error) => {
                    eprintln!("simcuda: no ledger: {path}: {error}");
                    self.template = None;
                    return;
                }
            }
        }
        if let Some((_, file)) = &mut self.open {
            let tid = thread_id();
            let line = format!("{{\"seq\":{number},\"time_ns\":{time_ns},\"pid\":{pid},\"tid\":{tid},{fields}}}\n");
            if let Err(error) = file.write_all(line.as_bytes()) {
                eprintln!("simcuda: the ledger lost a line: {error}");
            }
        }
    }
}

fn thread_id() -> i32 {
    // SAFETY: gettid has no arguments and cannot fail.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_applies_is_told() {
        let call = Call { api: "cuMemAlloc_v2", addr: Some(4096), size: Some(10), device: Some(1), ..Call::default() };
        assert_eq!(
            call.fields(Layer::Driver, true, 0),
            r#""layer":"driver","api":"cuMemAlloc_v2","nested":true,"addr":4096,"size":10,"device":1,"result":0"#
        );
        let call = Call { api: "cudaFreeAsync", addr: Some(1), stream: Some(2), ..Call::default() };
        assert_eq!(
            call.fields(Layer::Runtime, false, 1),
            r#""layer":"runtime","api":"cudaFreeAsync","addr":1,"stream":2,"result":1"#
        );
    }

    #[test]
    fn a_line_is_there_as_soon_as_it_is_appended() {
        let folder = std::env::temp_dir().join(format!("simcuda-ledger-{}", std::process::id()));
        let mut ledger = Ledger::new(Some(format!("{}.%p", folder.display())));
        let path = format!("{}.{}", folder.display(), std::process::id());
        for expected in 1..4u64 {
            let number = ledger.number();
            assert_eq!(number, expected);
            ledger.append(number, 5, "\"api\":\"x\"");
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().count() as u64, expected);
            assert!(text.lines().last().unwrap().starts_with(&format!("{{\"seq\":{expected},\"time_ns\":5,")));
        }
        std::fs::remove_file(path).unwrap();
    }
}
