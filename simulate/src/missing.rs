//! The calls of functions that the simulation lacks, in a file that is complete at any time, however the process ends.
//!
//! The file has one line a function: the number of its calls, right-aligned in [`COUNT_WIDTH`] characters, a space, and
//! its name.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// The width of the number of calls, which is overwritten in place.
const COUNT_WIDTH: usize = 20;

/// The functions that this process has called, and the file about them.
#[derive(Debug, Default)]
pub struct MissingFunctions {
    /// The path of the file, in which `%p` stands for the process id. `None` if nobody wants it.
    template: Option<String>,
    /// The file, with the process that opened it: a forked child has its own.
    open: Option<(u32, File)>,
    /// For each function the offset of its line, and the number of calls.
    calls: HashMap<String, (u64, u64)>,
    /// The length of the file.
    length: u64,
}

/// Whether a function belongs to the driver or the runtime. They decide how much memory a program takes; the other
/// libraries mostly compute, which nothing does here.
fn allocates(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("cu") else { return false };
    let is_driver = rest.starts_with(|c: char| c.is_ascii_uppercase()) && !rest.starts_with("File");
    (is_driver || rest.starts_with("da")) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

impl MissingFunctions {
    /// Calls that are noted in a file.
    pub fn new(template: Option<String>) -> Self {
        MissingFunctions { template, ..Self::default() }
    }

    /// Counts a call.
    pub fn add(&mut self, name: &str) {
        let Some(template) = self.template.as_ref().filter(|_| allocates(name)) else { return };
        let pid = std::process::id();
        if self.open.as_ref().is_none_or(|(owner, _)| *owner != pid) {
            let path = template.replace("%p", &pid.to_string());
            // Whoever named a file that cannot be written reads nothing.
            let Ok(file) = File::options().write(true).create(true).truncate(true).mode(0o600).open(path) else {
                return;
            };
            *self = MissingFunctions { template: self.template.take(), open: Some((pid, file)), ..Self::default() };
        }
        let Some((_, file)) = &self.open else { return };
        let (offset, calls) = self.calls.entry(name.to_owned()).or_insert((self.length, 0));
        *calls += 1;
        if *calls == 1 {
            let line = format!("{:>COUNT_WIDTH$} {name}\n", 1);
            file.write_all_at(line.as_bytes(), *offset).ok();
            self.length += line.len() as u64;
        } else {
            file.write_all_at(format!("{calls:>COUNT_WIDTH$}").as_bytes(), *offset).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_each_function_and_its_calls() {
        let beginning = std::env::temp_dir().join(format!("simcuda-missing-{}", std::process::id()));
        let mut missing = MissingFunctions::new(Some(format!("{}.%p", beginning.display())));
        for name in ["cuNew", "cudaNew", "cuNew", "cublasNew", "cuFileOpen", "cuGetProcAddress(cuNew)", "cuNew"] {
            missing.add(name);
        }
        let path = format!("{}.{}", beginning.display(), std::process::id());
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, [["3", "cuNew"], ["1", "cudaNew"]]);
    }
}
