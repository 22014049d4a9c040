//! The options that the launcher passes to the preloaded library: one environment variable, parsed once.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::named;

/// The environment variable that contains [`Options`] and switches the library on.
pub const ENV: &str = "MEMTRACE_SESSION";

named! {
    /// Whether CPU tensors are recorded.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub enum Cpu {
        /// Until the program uses a CUDA device.
        #[default]
        Auto => "auto",
        /// Always.
        Always => "always",
        /// Never.
        Never => "never",
    }
}

named! {
    /// Which stacks are captured.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub enum Stacks {
        /// Python frames.
        #[default]
        Python => "python",
        /// Native frames.
        Native => "native",
        /// Both, merged.
        Both => "both",
        /// None.
        None => "none",
    }
}

named! {
    /// The handling of the memory pools of JAX and CuPy.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Pools {
        /// Nothing.
        #[default]
        Keep => "keep",
        /// Their figures are read when the interpreter ends.
        Read => "read",
        /// They are switched off.
        Off => "off",
    }
}

/// How much memory of each device the run sees.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Limit {
    /// In bytes. 0 if there is no limit.
    pub bytes: u64,
    /// The bytes that other programs used when the run started, by the PCI address of the device. They do not count.
    pub others: Vec<(String, u64)>,
}

/// All options of the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// The name of the launcher's socket ([`crate::shm::handshake`]).
    pub token: String,
    /// Whether CPU tensors are recorded.
    pub cpu: Cpu,
    /// Which stacks are captured.
    pub stacks: Stacks,
    /// Whether names of tensors and modules are recorded.
    pub names: bool,
    /// The run's folder as an absolute path. The library writes there what cannot go through the launcher. `None` if
    /// the launcher did not say it.
    pub folder: Option<PathBuf>,
    /// Whether reference cycles are examined and written into [`Self::folder`].
    pub cycles: bool,
    /// Whether the program's objects are searched for what holds tensors.
    pub holders: bool,
    /// The handling of the memory pools of JAX and CuPy.
    pub pools: Pools,
    /// Whether the driver is asked how much of a device's memory is in use.
    pub device_usage: bool,
    /// How much memory of each device the run sees.
    pub limit: Limit,
    /// The number of seccomp filters under which the launcher runs.
    pub filters: u32,
}

impl Options {
    /// The value of the environment variable: `token;cpu=auto;stacks=python;filters=0`.
    pub fn encode(&self) -> String {
        let names = if self.names { "" } else { ";names=off" };
        let (cpu, stacks) = (self.cpu.name(), self.stacks.name());
        // The path is in hexadecimal, because it may contain any byte.
        let hex = |path: &PathBuf| path.as_os_str().as_bytes().iter().map(|b| format!("{b:02x}")).collect::<String>();
        let folder = self.folder.as_ref().map_or(String::new(), |path| format!(";folder={}", hex(path)));
        let cycles = if self.cycles { ";cycles=on" } else { "" };
        let holders = if self.holders { ";holders=on" } else { "" };
        let pools = if self.pools == Pools::Keep { String::new() } else { format!(";pools={}", self.pools.name()) };
        let usage = if self.device_usage { "" } else { ";usage=off" };
        let limit = if self.limit.bytes == 0 { String::new() } else { format!(";limit={}", self.limit.bytes) };
        let other = |(pci, bytes): &(String, u64)| format!(";others={pci},{bytes}");
        let others: String = self.limit.others.iter().map(other).collect();
        format!(
            "{};cpu={cpu};stacks={stacks};filters={}{names}{cycles}{holders}{pools}{usage}{limit}{others}{folder}",
            self.token, self.filters
        )
    }

    /// Parses the result of [`Self::encode`]. `None` without a valid token. Unknown keys and values are ignored:
    /// launcher and library come from one build, and the library must not fail.
    pub fn parse(value: &str) -> Option<Options> {
        let mut parts = value.split(';');
        let token = parts.next().filter(|t| !t.is_empty() && t.len() <= 64)?;
        let mut options = Options {
            token: token.to_owned(),
            cpu: Cpu::default(),
            stacks: Stacks::default(),
            names: true,
            folder: None,
            cycles: false,
            holders: false,
            pools: Pools::default(),
            device_usage: true,
            limit: Limit::default(),
            filters: 0,
        };
        for (key, value) in parts.filter_map(|p| p.split_once('=')) {
            match key {
                "cpu" => options.cpu = Cpu::from_name(value).unwrap_or_default(),
                "stacks" => options.stacks = Stacks::from_name(value).unwrap_or_default(),
                "filters" => options.filters = value.parse().unwrap_or(0),
                "names" => options.names = value != "off",
                "folder" => options.folder = path(value),
                "cycles" => options.cycles = value == "on",
                "holders" => options.holders = value == "on",
                "pools" => options.pools = Pools::from_name(value).unwrap_or_default(),
                "limit" => options.limit.bytes = value.parse().unwrap_or(0),
                "others" => options.limit.others.extend(other(value)),
                "usage" => options.device_usage = value != "off",
                _ => {}
            }
        }
        Some(options)
    }
}

/// The PCI address of a device and the bytes in use there. `None` if it is malformed.
fn other(value: &str) -> Option<(String, u64)> {
    let (pci, bytes) = value.split_once(',')?;
    Some((pci.to_owned(), bytes.parse().ok()?))
}

/// The path in these hexadecimal digits. `None` if it is empty or malformed.
fn path(hex: &str) -> Option<PathBuf> {
    let digit = |b: &u8| char::from(*b).to_digit(16);
    let byte = |pair: &[u8; 2]| u8::try_from(digit(&pair[0])? * 16 + digit(&pair[1])?).ok();
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
    (rest.is_empty() && !bytes.is_empty()).then(|| OsString::from_vec(bytes).into())
}

/// The number of seccomp filters of a process, from its `/proc/PID/status`. Before Linux 5.10 it is 1 if there are any.
pub fn filters_in(status: &str) -> u32 {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    field("Seccomp_filters:").unwrap_or_else(|| u32::from(field("Seccomp:") == Some(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_counted() {
        assert_eq!(filters_in("NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n"), 3);
        assert_eq!(filters_in("Seccomp:\t2\n"), 1);
        assert_eq!(filters_in("Seccomp:\t0\nSeccomp_filters:\t0\n"), 0);
        assert_eq!(filters_in(""), 0);
    }

    #[test]
    fn options_round_trip() {
        let others = vec![("00000000:1B:00.0".to_owned(), 5), ("00000000:43:00.0".to_owned(), 1 << 40)];
        let limit = || Limit { bytes: 24 << 30, others: others.clone() };
        for names in [false, true] {
            let (cpu, stacks) = (Cpu::Never, Stacks::Both);
            let (folder, cycles) = (names.then(|| PathBuf::from("/runs; of/ü=1")), names);
            let token = "0123abcd".into();
            let pools = if names { Pools::Off } else { Pools::Read };
            let options = Options {
                token,
                cpu,
                stacks,
                names,
                folder,
                cycles,
                holders: !names,
                pools,
                device_usage: names,
                limit: if names { limit() } else { Limit::default() },
                filters: 3,
            };
            assert_eq!(Options::parse(&options.encode()), Some(options));
        }
        assert_eq!(Options::parse(""), None);
        for bad in ["t;folder=", "t;folder=2", "t;folder=2g"] {
            assert_eq!(Options::parse(bad).unwrap().folder, None, "{bad}");
        }
        assert_eq!(Options::parse("t;cpu=what;x=1;y").unwrap().cpu, Cpu::Auto);
    }
}
