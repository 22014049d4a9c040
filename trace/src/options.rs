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

/// A type of values that options have.
trait OptionValue: Sized {
    /// The value as text without `;`. Empty for a value that need not be passed.
    fn encode(&self) -> String;

    /// The value of a text that [`Self::encode`] made. `None` for another text.
    fn parse(text: &str) -> Option<Self>;
}

/// Declares the options: for each, its name here and in the environment variable, its type, and the value that it has
/// where nothing is passed.
macro_rules! library_options {
    ($($(#[$doc:meta])* $name:ident: $Type:ty = $default:expr,)*) => {
        /// All options of the library.
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct Options {
            /// The name of the launcher's socket ([`crate::shm::handshake`]).
            pub token: String,
            $($(#[$doc])* pub $name: $Type,)*
        }

        impl Options {
            /// The options that change nothing, for the launcher with this token.
            pub fn new(token: String) -> Options {
                Options { token, $($name: $default,)* }
            }

            /// Name and value of each option.
            fn values(&self) -> Vec<(&'static str, String)> {
                vec![$((stringify!($name), OptionValue::encode(&self.$name))),*]
            }

            /// Sets the option `name`. An unknown name, and a value that cannot be parsed, change nothing: launcher and
            /// library come from one build, and the library must not fail.
            fn set(&mut self, name: &str, value: &str) {
                match name {
                    $(stringify!($name) => {
                        if let Some(value) = OptionValue::parse(value) {
                            self.$name = value;
                        }
                    })*
                    _ => {}
                }
            }
        }
    };
}

library_options! {
    /// Whether CPU tensors are recorded.
    cpu: Cpu = Cpu::default(),
    /// Which stacks are captured.
    stacks: Stacks = Stacks::default(),
    /// Whether names of tensors and modules are recorded.
    names: bool = true,
    /// Whether reference cycles are examined and written into [`Options::folder`].
    cycles: bool = false,
    /// Whether the program's objects are searched for what holds tensors.
    holders: bool = false,
    /// The handling of the memory pools of JAX and CuPy.
    pools: Pools = Pools::default(),
    /// Whether the driver is asked how much of a device's memory is in use.
    device_usage: bool = true,
    /// How much memory of each device the run sees.
    limit: Limit = Limit::default(),
    /// The number of seccomp filters under which the launcher runs.
    filters: u32 = 0,
    /// The run's folder as an absolute path. The library writes there what cannot go through the launcher. `None` if
    /// the launcher did not say it.
    folder: Option<PathBuf> = None,
}

impl Options {
    /// The value of the environment variable: `token;cpu=auto;stacks=python;names=on`.
    pub fn encode(&self) -> String {
        let mut text = self.token.clone();
        for (name, value) in self.values().into_iter().filter(|(_, value)| !value.is_empty()) {
            text.extend([";", name, "=", &value]);
        }
        text
    }

    /// Parses the result of [`Self::encode`]. `None` without a valid token.
    pub fn parse(text: &str) -> Option<Options> {
        let mut parts = text.split(';');
        let token = parts.next().filter(|token| !token.is_empty() && token.len() <= 64)?;
        let mut options = Options::new(token.to_owned());
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            options.set(name, value);
        }
        Some(options)
    }
}

impl OptionValue for bool {
    fn encode(&self) -> String {
        if *self { "on" } else { "off" }.to_owned()
    }

    fn parse(text: &str) -> Option<bool> {
        match text {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        }
    }
}

impl OptionValue for u32 {
    fn encode(&self) -> String {
        self.to_string()
    }

    fn parse(text: &str) -> Option<u32> {
        text.parse().ok()
    }
}

/// The name of a value is its text.
macro_rules! option_value_is_name {
    ($($Type:ty),*) => {
        $(impl OptionValue for $Type {
            fn encode(&self) -> String {
                self.name().to_owned()
            }

            fn parse(text: &str) -> Option<$Type> {
                <$Type>::from_name(text)
            }
        })*
    };
}

option_value_is_name!(Cpu, Stacks, Pools);

/// `bytes`, then `,PCI=bytes` for each device.
impl OptionValue for Limit {
    fn encode(&self) -> String {
        if *self == Limit::default() {
            return String::new();
        }
        let others: String = self.others.iter().map(|(pci, bytes)| format!(",{pci}={bytes}")).collect();
        format!("{}{others}", self.bytes)
    }

    fn parse(text: &str) -> Option<Limit> {
        let mut parts = text.split(',');
        let bytes = parts.next()?.parse().ok()?;
        let other =
            |part: &str| part.split_once('=').and_then(|(pci, bytes)| Some((pci.to_owned(), bytes.parse().ok()?)));
        Some(Limit { bytes, others: parts.filter_map(other).collect() })
    }
}

/// The bytes of the path in hexadecimal digits, because it may contain any byte.
impl OptionValue for Option<PathBuf> {
    fn encode(&self) -> String {
        let hex = |path: &PathBuf| path.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        self.as_ref().map_or(String::new(), hex)
    }

    fn parse(text: &str) -> Option<Option<PathBuf>> {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let byte = |pair: &[u8; 2]| u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok();
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
        (rest.is_empty() && !bytes.is_empty()).then(|| Some(OsString::from_vec(bytes).into()))
    }
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
        let unchanged = Options::new("0123abcd".to_owned());
        let changed = Options {
            token: "0123abcd".to_owned(),
            cpu: Cpu::Never,
            stacks: Stacks::Both,
            names: false,
            cycles: true,
            holders: true,
            pools: Pools::Off,
            device_usage: false,
            limit: Limit { bytes: 24 << 30, others },
            filters: 3,
            folder: Some(PathBuf::from("/runs; of/ü=1,2")),
        };
        for ((name, one), (_, other)) in unchanged.values().iter().zip(changed.values()) {
            assert_ne!(*one, other, "{name}: the test changes each option");
        }
        for options in [unchanged, changed] {
            assert_eq!(Options::parse(&options.encode()), Some(options));
        }
        assert_eq!(Options::parse(""), None);
        for bad in ["t;folder=", "t;folder=2", "t;folder=2g", "t;cpu=what;x=1;y;names=;limit=x,y=1;filters=-1"] {
            assert_eq!(Options::parse(bad), Some(Options::new("t".to_owned())), "{bad}");
        }
    }
}
