//! The ledger: one JSON line for every allocation or free that was served, in the order of service.
//!
//! Each line is appended with one unbuffered `write(2)` to a file opened with `O_APPEND`. Every served call is
//! therefore on record even if the process is killed at once. Several processes may share a file. A forked child opens
//! its own file when the path contains `%p`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;

/// The interface that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// libcuda
    Driver,
    /// libcudart
    Runtime,
}

/// One served call. Fields that do not apply are `None` and are left out of the line.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// The exact name of the exported symbol.
    pub api: &'static str,
    /// The address, or 0 when the call returned none. `None` for calls about a handle.
    pub addr: Option<u64>,
    /// The size in bytes. For a free, the size of the allocation if it is known.
    pub size: Option<u64>,
    /// The device ordinal, as the program counts.
    pub device: Option<usize>,
    /// The stream handle that the program passed. 2, the per-thread default stream, for a `_ptsz` call.
    pub stream: Option<u64>,
    /// The handle of physical memory, an array or a pool.
    pub handle: Option<u64>,
    /// The offset of a mapping in the physical memory, in bytes.
    pub offset: Option<u64>,
    /// The distance between rows in bytes.
    pub pitch: Option<u64>,
    /// The flags argument.
    pub flags: Option<u64>,
}

impl Call {
    /// The part of the line that describes the call: everything but the number, the time and the process.
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
    /// Creates a ledger at a path in which `%p` stands for the process id. `None` disables it.
    pub fn new(template: Option<String>) -> Self {
        Ledger { template, open: None, next: 1 }
    }

    /// Whether calls are recorded.
    pub fn is_on(&self) -> bool {
        self.template.is_some()
    }

    /// Issues the next number in the order of service.
    pub fn number(&mut self) -> u64 {
        let n = self.next;
        self.next += 1;
        n
    }

    /// Appends a line. `time_ns` is the time of the call in nanoseconds.
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
    // SAFETY: `gettid` takes no arguments, accesses no memory of ours and cannot fail.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_only_the_fields_that_apply() {
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
    fn an_appended_line_can_be_read_at_once() {
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
