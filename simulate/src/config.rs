//! The settings, all from the environment. They are read once, when the driver is first used.

use crate::fault::Faults;
use crate::uuid::uuid_text;
use std::ffi::CString;
use std::path::PathBuf;

/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// The maximum number of devices on the host.
pub const MAX_DEVICES: usize = 64;

/// How much is printed on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Log {
    /// Nothing.
    Quiet,
    /// Peaks, launches and the stubs that were called, at the end of the process.
    Summary,
}

/// The properties of a model of GPU, besides its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The device's name (`SIMCUDA_NAME`).
    pub name: CString,
    /// The compute capability times ten (`SIMCUDA_SM`).
    pub sm: u32,
    /// The number of multiprocessors (`SIMCUDA_MULTIPROCESSORS`).
    pub multiprocessors: u32,
    /// The size of the L2 cache in bytes (`SIMCUDA_L2`).
    pub l2_bytes: u64,
    /// The number of NVLink links (`SIMCUDA_NVLINKS`).
    pub nvlinks: u32,
}

impl Model {
    /// Whether a device can access the memory of another one. NVIDIA's driver refuses it for GeForce cards that PCI
    /// Express alone connects.
    pub fn has_peer_access(&self) -> bool {
        self.nvlinks > 0 || !self.name.to_bytes().windows(7).any(|word| word == b"GeForce")
    }
}

/// The settings. README.md lists them in a table.
#[derive(Debug)]
pub struct Config {
    /// The number of devices on the host (`SIMCUDA_DEVICES`), at most [`MAX_DEVICES`].
    pub physical: u32,
    /// The physical ordinals of the visible devices (`SIMCUDA_DEVICES` filtered by `CUDA_VISIBLE_DEVICES`).
    pub visible: Vec<u32>,
    /// The capacity of each device in bytes (`SIMCUDA_MEMORY`).
    pub memory_bytes: u64,
    /// The folder through which processes share that capacity (`SIMCUDA_SHARED`). Without it, each process has all of
    /// it.
    pub shared: Option<PathBuf>,
    /// Whether allocations beyond the capacity succeed, with memory of the host (`SIMCUDA_SPILL`).
    pub spills: bool,
    /// The device memory that an executable graph takes for each of its nodes, in bytes (`SIMCUDA_GRAPH_NODE`).
    pub graph_node_bytes: u64,
    /// The device memory that a context takes, in bytes (`SIMCUDA_CONTEXT`).
    pub context_bytes: u64,
    /// Whether kernels and libraries take device memory as on a GPU (`SIMCUDA_LIBRARY_MEMORY`).
    pub library_memory: bool,
    /// Whether modules are loaded with the context, not at the first use of a kernel (`CUDA_MODULE_LOADING`).
    pub eager_loading: bool,
    /// Processes of others that use the devices (`SIMCUDA_PROCESSES`).
    pub other_processes: Vec<OtherProcess>,
    /// Whether the devices are divided into instances (`SIMCUDA_MIG`).
    pub mig: Mig,
    /// The memory of each device that the driver and the firmware keep for themselves, in bytes (`SIMCUDA_RESERVED`).
    /// Only NVML reports it, in addition to the capacity.
    pub reserved_bytes: u64,
    /// The virtual time of one launch in nanoseconds (`SIMCUDA_KERNEL_US`).
    pub kernel_ns: u64,
    /// The model of all devices.
    pub model: Model,
    /// The version that `cuDriverGetVersion` reports (`SIMCUDA_DRIVER_VERSION`).
    pub driver_version: i32,
    /// How much is printed on stderr (`SIMCUDA_LOG`).
    pub log: Log,
    /// The path of the ledger, in which `%p` stands for the process id (`SIMCUDA_LEDGER`).
    pub ledger: Option<String>,
    /// The path of the file about functions that the simulation lacks, in which `%p` stands for the process id
    /// (`SIMCUDA_MISSING`).
    pub missing: Option<String>,
    /// The allocations that fail on demand (`SIMCUDA_FAIL`).
    pub faults: Faults,
}

/// A process that uses a device, and is no part of the simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherProcess {
    /// Its process id.
    pub pid: u32,
    /// The path of its program, as NVML reports it.
    pub name: String,
    /// The memory that it uses, in bytes.
    pub bytes: u64,
    /// The physical ordinal of the device.
    pub device: u32,
    /// The GPU instance in which it runs, where devices are divided. `None` if NVML does not report it.
    pub instance: Option<u32>,
    /// Whether it is a client of MPS.
    pub is_mps: bool,
}

/// The division of all devices into instances (`SIMCUDA_MIG`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mig {
    /// The devices are not divided.
    #[default]
    Off,
    /// The programs of the simulation run in this GPU instance.
    Instance(u32),
    /// NVML does not report the instance of the programs of the simulation.
    Unknown,
}

impl Mig {
    fn parse(text: &str) -> Option<Self> {
        if text == "unknown" { Some(Mig::Unknown) } else { text.parse().ok().map(Mig::Instance) }
    }

    /// The GPU instance of the programs of the simulation, as NVML reports it.
    pub fn instance(self) -> Option<u32> {
        match self {
            Mig::Instance(instance) => Some(instance),
            Mig::Off | Mig::Unknown => None,
        }
    }
}

impl OtherProcess {
    /// Parses `PID:NAME:SIZE`, `PID:NAME:SIZE@DEVICE` or one of them with `/migINSTANCE` and `/mps`. `None` if the text
    /// is something else.
    fn parse(text: &str) -> Option<Self> {
        let (pid, rest) = text.trim().split_once(':')?;
        let (name, rest) = rest.rsplit_once(':')?;
        let mut words = rest.split('/');
        let memory = words.next()?;
        let (size, device) = memory.split_once('@').unwrap_or((memory, "0"));
        let mut process = OtherProcess {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
            bytes: parse_size(size)?,
            device: device.parse().ok()?,
            instance: None,
            is_mps: false,
        };
        for word in words {
            match word.strip_prefix("mig") {
                Some(instance) => process.instance = Some(instance.parse().ok()?),
                None if word == "mps" => process.is_mps = true,
                None => return None,
            }
        }
        Some(process)
    }

    /// Whether it uses the same memory of its device as the programs of the simulation.
    pub fn shares_memory(&self, mig: Mig) -> bool {
        mig == Mig::Off || self.instance.is_some() && self.instance == mig.instance()
    }

    /// Parses several, with commas in between.
    fn parse_list(text: &str) -> Option<Vec<Self>> {
        text.split(',').map(Self::parse).collect()
    }
}

/// Parses a size such as `8G`, `512MiB`, `1.5g` or `4096`, in bytes. `None` when the text is not a size.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1u64 << 40,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * scale as f64) as u64)
}

/// The physical ordinals that `CUDA_VISIBLE_DEVICES` selects from `count` devices.
///
/// An entry is an ordinal, or a UUID or its unique beginning. The list ends at the first entry that names no device, as
/// in the real driver.
fn visible(count: u32, list: Option<&str>) -> Vec<u32> {
    let device = |entry: &str| match entry.parse::<u32>() {
        Ok(ordinal) => Some(ordinal).filter(|&n| n < count),
        Err(_) => by_uuid(count, entry),
    };
    match list {
        None => (0..count).collect(),
        Some(list) => list.split(',').map_while(|entry| device(entry.trim())).collect(),
    }
}

/// The device whose UUID begins so, if it is the only one.
fn by_uuid(count: u32, beginning: &str) -> Option<u32> {
    let mut found =
        (0..count).filter(|&ordinal| beginning.starts_with("GPU-") && uuid_text(ordinal).starts_with(beginning));
    found.next().filter(|_| found.next().is_none())
}

impl Config {
    /// Reads the settings of this process.
    pub fn from_env() -> Self {
        Self::parse(|name| std::env::var(name).ok())
    }

    /// Reads the settings through a lookup function. An unreadable value is reported on stderr and replaced by the
    /// default.
    pub fn parse(lookup: impl Fn(&str) -> Option<String>) -> Self {
        fn read<T>(value: Option<String>, name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> T {
            let Some(text) = value.filter(|t| !t.is_empty()) else { return default };
            parse(&text).unwrap_or_else(|| {
                eprintln!("simcuda: cannot read {name}={text}: the default is used");
                default
            })
        }
        let size = |name, default| read(lookup(name), name, default, parse_size);
        let number = |name, default: f64| read(lookup(name), name, default, |t| t.trim().parse().ok());
        let physical = (number("SIMCUDA_DEVICES", 1.0) as u32).min(MAX_DEVICES as u32);
        Config {
            physical,
            visible: visible(physical, lookup("CUDA_VISIBLE_DEVICES").as_deref()),
            memory_bytes: size("SIMCUDA_MEMORY", 8192 * MIB),
            shared: lookup("SIMCUDA_SHARED").filter(|path| !path.is_empty()).map(PathBuf::from),
            context_bytes: size("SIMCUDA_CONTEXT", 0),
            library_memory: number("SIMCUDA_LIBRARY_MEMORY", 0.0) != 0.0,
            eager_loading: lookup("CUDA_MODULE_LOADING").as_deref() == Some("EAGER"),
            other_processes: read(
                lookup("SIMCUDA_PROCESSES"),
                "SIMCUDA_PROCESSES",
                Vec::new(),
                OtherProcess::parse_list,
            ),
            mig: read(lookup("SIMCUDA_MIG"), "SIMCUDA_MIG", Mig::Off, Mig::parse),
            reserved_bytes: size("SIMCUDA_RESERVED", 0),
            spills: number("SIMCUDA_SPILL", 0.0) != 0.0,
            graph_node_bytes: size("SIMCUDA_GRAPH_NODE", 0),
            kernel_ns: (number("SIMCUDA_KERNEL_US", 0.0) * 1000.0) as u64,
            model: Model {
                name: read(lookup("SIMCUDA_NAME"), "SIMCUDA_NAME", c"Simulated CUDA device".to_owned(), |t| {
                    CString::new(t).ok()
                }),
                sm: number("SIMCUDA_SM", 90.0) as u32,
                multiprocessors: number("SIMCUDA_MULTIPROCESSORS", 132.0) as u32,
                l2_bytes: size("SIMCUDA_L2", 50 * MIB),
                nvlinks: number("SIMCUDA_NVLINKS", 18.0) as u32,
            },
            driver_version: number("SIMCUDA_DRIVER_VERSION", 13000.0) as i32,
            log: if number("SIMCUDA_LOG", 0.0) >= 1.0 { Log::Summary } else { Log::Quiet },
            ledger: lookup("SIMCUDA_LEDGER").filter(|p| !p.is_empty()),
            missing: lookup("SIMCUDA_MISSING").filter(|p| !p.is_empty()),
            faults: read(lookup("SIMCUDA_FAIL"), "SIMCUDA_FAIL", Faults::default(), Faults::parse),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("8G"), Some(8 << 30));
        assert_eq!(parse_size("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("12 apples"), None);
        assert_eq!(parse_size(""), None);
    }

    #[test]
    fn visible_devices_end_at_the_first_unknown_one() {
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(visible(4, Some("3,1")), [3, 1]);
        assert_eq!(visible(4, Some("0,-1,2")), [0]);
        assert_eq!(visible(4, Some("")), [] as [u32; 0]);
        assert_eq!(visible(2, Some("1,7,0")), [1]);
    }

    #[test]
    fn uuids_select_visible_devices() {
        let (first, second) = (uuid_text(0), uuid_text(1));
        assert_eq!(visible(2, Some(&format!("{second},{first}"))), [1, 0]);
        assert_eq!(visible(1, Some(&first[..8])), [0], "the only one that begins so");
        assert_eq!(visible(2, Some(&first[..8])), [] as [u32; 0], "both begin so");
        assert_eq!(visible(2, Some("GPU-0")), [] as [u32; 0]);
    }

    #[test]
    fn other_processes() {
        let process = |name: &str, device| {
            let (name, bytes, instance, is_mps) = (name.to_owned(), 2 << 30, None, false);
            OtherProcess { pid: 7, name, bytes, device, instance, is_mps }
        };
        let divided = OtherProcess { instance: Some(3), is_mps: true, ..process("a", 1) };
        assert_eq!(OtherProcess::parse_list("7:a:2G@1/mig3/mps"), Some(vec![divided]));
        assert_eq!(OtherProcess::parse_list("7:a:2G/mug"), None);
        assert_eq!(OtherProcess::parse_list("7:/usr/bin/python:2G"), Some(vec![process("/usr/bin/python", 0)]));
        assert_eq!(OtherProcess::parse_list("7:a:b:2G@1,7:x:2G"), Some(vec![process("a:b", 1), process("x", 0)]));
        assert_eq!(OtherProcess::parse_list("7:2G"), None);
    }

    #[test]
    fn defaults_and_bad_values() {
        let config = Config::parse(|_| None);
        assert_eq!((config.memory_bytes, config.model.sm, config.visible.len()), (8 << 30, 90, 1));
        let config = Config::parse(|name| (name == "SIMCUDA_MEMORY").then(|| "much".to_string()));
        assert_eq!(config.memory_bytes, 8 << 30);
    }
}
