//! Where samples come from, and the devices that they describe.

use memtrace_analysis::load::SampledProcess;

/// A device of this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SampledDevice {
    pub(crate) index: u32,
    pub(crate) pci: String,
    pub(crate) name: String,
    pub(crate) total_bytes: u64,
    pub(crate) reserved_bytes: u64,
    /// Whether the device is divided into instances (MIG).
    pub(crate) is_divided: bool,
}

/// Where the samples come from.
pub(crate) trait SampleSource {
    /// The version of NVIDIA's driver.
    fn driver(&self) -> String;
    /// The devices.
    fn devices(&self) -> Vec<SampledDevice>;
    /// The bytes in use on a device, and its processes by pid. `None` if the device does not answer.
    fn sample(&self, device: u32) -> Option<(u64, Vec<SampledProcess>)>;
    /// The name of a process's program, empty if it is unknown.
    fn process_name(&self, pid: u32) -> String;
}
