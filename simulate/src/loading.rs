//! The device memory that no call allocates: that of kernels, of modules, and of the threads' local variables.
//!
//! It is counted only where the settings ask for it. The figures are in [`crate::library_memory`].

use crate::attributes::attribute;
use crate::config::Config;
use crate::device::Device;
use crate::error::Result;
use crate::library_memory::{DEFAULT_STACK_BYTES, Kernels, STREAM_BYTES, local_memory_bytes};
use std::collections::{BTreeMap, HashMap, HashSet};

/// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`
const MAX_THREADS_PER_MULTIPROCESSOR: i32 = 39;

/// A module that a program loaded, and the devices to which its kernels were loaded.
#[derive(Debug)]
struct Module {
    bytes: u64,
    devices: Vec<usize>,
}

/// The streams of a device: how many exist, and how many existed at most.
#[derive(Debug, Default)]
struct Streams {
    existing: u64,
    most: u64,
}

/// The kernels and modules that are loaded on the devices of the process. Devices are ordinals.
#[derive(Debug, Default)]
pub struct Loading {
    kernels: HashSet<(usize, Kernels)>,
    modules: HashMap<u64, Module>,
    streams: BTreeMap<usize, Streams>,
    /// The stack of a thread, in bytes, as the program set it.
    stack_bytes: BTreeMap<usize, u64>,
    /// The local memory of the threads beyond that of the default stack, in bytes.
    local_bytes: BTreeMap<usize, u64>,
}

impl Loading {
    /// Loads kernels onto a device, if they are not there yet.
    ///
    /// # Errors
    ///
    /// If the device has too little memory. Nothing is loaded then.
    pub fn load(&mut self, config: &Config, device: (usize, &mut Device), kernels: Kernels) -> Result<()> {
        let (ordinal, device) = device;
        if !config.library_memory || self.kernels.contains(&(ordinal, kernels)) {
            return Ok(());
        }
        let bytes = |kernels: Kernels| if config.eager_loading { kernels.eager_bytes() } else { kernels.lazy_bytes() };
        let on_device = self.kernels.iter().filter(|(device, _)| *device == ordinal).map(|(_, loaded)| *loaded);
        let shared = on_device.filter(|loaded| kernels.shares_with(*loaded)).map(bytes).max().unwrap_or(0);
        device.take(bytes(kernels).saturating_sub(shared))?;
        self.kernels.insert((ordinal, kernels));
        Ok(())
    }

    /// Counts a stream that is made on a device.
    ///
    /// # Errors
    ///
    /// If the device has too little memory.
    pub fn add_stream(&mut self, config: &Config, device: (usize, &mut Device)) -> Result<()> {
        let (ordinal, device) = device;
        let streams = self.streams.entry(ordinal).or_default();
        // The driver keeps the memory of streams that are destroyed, for others.
        if config.library_memory && streams.existing == streams.most {
            device.take_block(STREAM_BYTES)?;
            streams.most += 1;
        }
        streams.existing += 1;
        Ok(())
    }

    /// Counts a stream of a device that is destroyed.
    pub fn remove_stream(&mut self, ordinal: usize) {
        let streams = self.streams.entry(ordinal).or_default();
        streams.existing = streams.existing.saturating_sub(1);
    }

    /// Registers a module with an image of so many bytes.
    pub fn register(&mut self, config: &Config, module: u64, bytes: u64) {
        if config.library_memory && bytes > 0 {
            self.modules.insert(module, Module { bytes, devices: Vec::new() });
        }
    }

    /// Loads the kernels of a module onto a device, if they are not there yet. Modules that are not registered take no
    /// memory.
    ///
    /// # Errors
    ///
    /// If the device has too little memory.
    pub fn load_module(&mut self, device: (usize, &mut Device), module: u64) -> Result<()> {
        let (ordinal, device) = device;
        let found = self.modules.get_mut(&module).filter(|module| !module.devices.contains(&ordinal));
        if let Some(module) = found {
            device.take_block(module.bytes)?;
            module.devices.push(ordinal);
        }
        Ok(())
    }

    /// Unloads a module from all devices.
    pub fn unload_module(&mut self, devices: &mut [Device], module: u64) {
        let Some(module) = self.modules.remove(&module) else { return };
        for ordinal in module.devices {
            devices[ordinal].give_block(module.bytes);
        }
    }

    /// The stack of a thread on a device, in bytes.
    pub fn stack_bytes(&self, ordinal: usize) -> u64 {
        self.stack_bytes.get(&ordinal).copied().unwrap_or(DEFAULT_STACK_BYTES)
    }

    /// Sets the stack of a thread on a device, in bytes. The next launch takes the memory.
    pub fn set_stack_bytes(&mut self, ordinal: usize, bytes: u64) {
        self.stack_bytes.insert(ordinal, bytes);
    }

    /// Allocates the memory for the stacks of all threads, if a program raised their limit.
    ///
    /// # Errors
    ///
    /// If the device has too little memory.
    pub fn resize_local_memory(&mut self, config: &Config, device: (usize, &mut Device)) -> Result<()> {
        let (ordinal, device) = device;
        let Some(&stack_bytes) = self.stack_bytes.get(&ordinal).filter(|_| config.library_memory) else {
            return Ok(());
        };
        let threads = attribute(MAX_THREADS_PER_MULTIPROCESSOR, device.physical, &config.model) as u32;
        let requested = local_memory_bytes(stack_bytes, config.model.multiprocessors, threads);
        let taken = self.local_bytes.entry(ordinal).or_default();
        // The driver keeps the memory when the limit falls again.
        if requested > *taken {
            device.take(requested - *taken)?;
            *taken = requested;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MIB;
    use crate::error::Error;

    fn parts(setting: &str) -> (Config, Loading, Device) {
        let config = Config::parse(|name| match name {
            "SIMCUDA_LIBRARY_MEMORY" => Some(setting.to_owned()),
            "CUDA_MODULE_LOADING" if setting == "2" => Some("EAGER".to_owned()),
            _ => None,
        });
        (config, Loading::default(), Device::new(0, 8 << 30, None).with_shared_pages(true))
    }

    #[test]
    fn kernels_are_loaded_once() {
        for (setting, bytes) in [("0", 0), ("1", 8 * MIB), ("2", 8 * MIB)] {
            let (config, mut loading, mut device) = parts(setting);
            for _ in 0..2 {
                loading.load(&config, (0, &mut device), Kernels::Cufft).unwrap();
            }
            assert_eq!(device.used(), bytes, "{setting}");
        }
    }

    #[test]
    fn kernels_of_cudnn_share_memory() {
        let (config, mut loading, mut device) = parts("1");
        let passes = [(Kernels::CudnnForward, 10), (Kernels::CudnnBackward, 20), (Kernels::CudnnAttention, 20)];
        for (kernels, mib) in passes {
            loading.load(&config, (0, &mut device), kernels).unwrap();
            assert_eq!(device.used(), mib * MIB, "{kernels:?}");
        }
    }

    #[test]
    fn streams_take_memory_that_others_use_again() {
        let (config, mut loading, mut device) = parts("1");
        for round in 0..2 {
            for _ in 0..128 {
                loading.add_stream(&config, (0, &mut device)).unwrap();
            }
            assert_eq!(device.used(), 70 * MIB, "{round}");
            (0..128).for_each(|_| loading.remove_stream(0));
        }
    }

    #[test]
    fn kernels_for_which_there_is_no_memory_are_not_loaded() {
        let (config, mut loading, _) = parts("1");
        let mut small = Device::new(0, MIB, None);
        assert_eq!(loading.load(&config, (0, &mut small), Kernels::Cufft), Err(Error::OutOfMemory));
        let mut large = Device::new(0, 9 * MIB, None);
        loading.load(&config, (0, &mut large), Kernels::Cufft).unwrap();
        assert_eq!(large.used(), 8 * MIB);
    }

    #[test]
    fn modules_share_pages_until_they_are_unloaded() {
        let (config, mut loading, mut device) = parts("1");
        for module in [1, 2] {
            loading.register(&config, module, 50_000);
            assert_eq!(device.used(), (module - 1) * 2 * MIB, "loaded by the use of a kernel");
            loading.load_module((0, &mut device), module).unwrap();
            loading.load_module((0, &mut device), module).unwrap();
            assert_eq!(device.used(), 2 * MIB);
        }
        let mut devices = [device];
        loading.unload_module(&mut devices, 1);
        assert_eq!(devices[0].used(), 2 * MIB);
        loading.unload_module(&mut devices, 2);
        assert_eq!(devices[0].used(), 0);
    }

    #[test]
    fn a_larger_stack_takes_memory_at_the_next_launch() {
        let (config, mut loading, mut device) = parts("1");
        loading.resize_local_memory(&config, (0, &mut device)).unwrap();
        loading.set_stack_bytes(0, 2048);
        assert_eq!(device.used(), 0);
        for stack in [2048, 1024] {
            loading.set_stack_bytes(0, stack);
            loading.resize_local_memory(&config, (0, &mut device)).unwrap();
            assert_eq!(device.used(), 264 * MIB);
        }
    }
}
