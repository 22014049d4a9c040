//! The whole simulated machine: one value that owns all state; the driver keeps it behind one lock.

use crate::array::Shape;
use crate::backing;
use crate::config::{Config, MIB};
use crate::context::Contexts;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::graph::{Capture, Graphs};
use crate::handle::{Handles, Kind as HandleKind, fixed};
use crate::ipc::MemHandle;
use crate::ledger::Ledger;
use crate::memory::{Freed, Kind, Memory, charge};
use crate::pool::Pool;
use crate::stream::Streams;
use crate::vmm::{Mapping, Physical, Vmm};
use std::collections::{BTreeMap, HashMap};

/// What the physical-memory and address-range functions take sizes in, bytes.
pub const GRANULARITY: u64 = 2 * MIB;

/// What is asked of `cuMemCreate`.
#[derive(Clone, Copy, Debug)]
pub struct PhysicalRequest {
    /// Bytes.
    pub size: u64,
    /// Device, or None for host memory.
    pub device: Option<usize>,
    /// Whether a file descriptor is to be had of it.
    pub shareable: bool,
    /// The properties, to be told again.
    pub properties: [u64; 4],
}

/// What an address belongs to, as `cuPointerGetAttribute` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointee {
    /// First address of the allocation.
    pub base: u64,
    /// Its bytes.
    pub size: u64,
    /// Its device.
    pub device: usize,
    /// What it is.
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug)]
struct Array {
    device: usize,
    bytes: u64,
    charged: u64,
}

/// All state.
#[derive(Debug)]
pub struct Machine {
    /// The settings.
    pub config: Config,
    /// Visible devices, by the program's ordinals.
    pub devices: Vec<Device>,
    /// Streams and events.
    pub streams: Streams,
    /// Contexts.
    pub contexts: Contexts,
    /// Captures and graphs.
    pub graphs: Graphs,
    /// The oracle.
    pub ledger: Ledger,
    /// Deals out handles.
    pub handles: Handles,
    /// Stubs called, and how often.
    pub stubs: BTreeMap<String, u64>,
    /// Launches, copies and sets so far.
    pub launches: u64,
    memory: Memory,
    vmm: Vmm,
    pools: HashMap<u64, Pool>,
    current_pools: Vec<u64>,
    arrays: HashMap<u64, Array>,
    symbols: HashMap<(u64, usize), u64>,
}

impl Machine {
    /// A machine by its settings.
    pub fn new(mut config: Config) -> Self {
        let devices: Vec<Device> =
            config.visible.iter().map(|&physical| Device::new(physical, config.memory_bytes)).collect();
        let mut handles = Handles::default();
        let pools = (0..devices.len()).map(|d| (Self::default_pool(d), Pool::new(d))).collect();
        Machine {
            streams: Streams::new(devices.len(), &mut handles),
            contexts: Contexts::default(),
            graphs: Graphs::default(),
            ledger: Ledger::new(config.ledger.take()),
            stubs: BTreeMap::new(),
            launches: 0,
            memory: Memory::default(),
            vmm: Vmm::default(),
            arrays: HashMap::new(),
            symbols: HashMap::new(),
            config,
            current_pools: (0..devices.len()).map(Self::default_pool).collect(),
            devices,
            handles,
            pools,
        }
    }

    /// A device by its ordinal.
    pub fn device(&mut self, ordinal: usize) -> Result<&mut Device> {
        self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)
    }

    /// Makes the device's primary context if there is none, at its cost.
    pub fn activate(&mut self, ordinal: usize) -> Result<()> {
        let bytes = self.config.context_bytes;
        let device = self.device(ordinal)?;
        if !device.primary_active {
            device.take(bytes)?;
            device.primary_active = true;
        }
        Ok(())
    }

    /// Makes a context beside the primary one.
    pub fn create_context(&mut self, ordinal: usize) -> Result<u64> {
        let bytes = self.config.context_bytes;
        self.device(ordinal)?.take(bytes)?;
        Ok(self.contexts.create(ordinal, &mut self.handles))
    }

    /// Ends a context that was made so.
    pub fn destroy_context(&mut self, handle: u64) -> Result<()> {
        let ordinal = self.contexts.destroy(handle)?;
        let bytes = self.config.context_bytes;
        self.device(ordinal)?.give(bytes);
        Ok(())
    }

    // ---------- memory with an address ----------

    /// Device memory.
    pub fn allocate(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        let cost = charge(size);
        self.device(ordinal)?.take(cost)?;
        let allocated = self.memory.allocate(size, ordinal, Kind::Device, cost);
        if allocated.is_err() {
            self.device(ordinal)?.give(cost);
        }
        allocated
    }

    /// Managed memory: it costs no device anything here.
    pub fn allocate_managed(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        self.memory.allocate(size, ordinal, Kind::Managed, 0)
    }

    /// Page-locked host memory.
    pub fn allocate_host(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        self.memory.allocate_host(size, ordinal)
    }

    /// Memory of a pool.
    pub fn allocate_pooled(&mut self, pool: u64, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        let cost = backing::round_up(size, 512);
        let books = self.pools.get_mut(&pool).ok_or(Error::InvalidValue)?;
        let ordinal = books.device;
        let device = self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)?;
        books.take(cost, device)?;
        let allocated = self.memory.allocate(size, ordinal, Kind::Pooled(pool), cost);
        if allocated.is_err() {
            books.give(cost);
        }
        allocated
    }

    /// `cuMemFree`: device, managed and pooled memory. Null is nothing.
    pub fn free(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| matches!(kind, Kind::Device | Kind::Managed | Kind::Pooled(_)))
    }

    /// `cuMemFreeAsync`: pooled memory only.
    pub fn free_pooled(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| matches!(kind, Kind::Pooled(_)))
    }

    /// `cuMemFreeHost`.
    pub fn free_host(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| kind == Kind::Host)
    }

    /// `cuIpcCloseMemHandle`.
    pub fn close_import(&mut self, base: u64) -> Result<Freed> {
        self.memory.free(base, |kind| kind == Kind::Imported)
    }

    fn free_kind(&mut self, base: u64, takes: impl Fn(Kind) -> bool) -> Result<Option<Freed>> {
        if base == 0 {
            return Ok(None);
        }
        let freed = self.memory.free(base, takes)?;
        let device = self.devices.get_mut(freed.device).ok_or(Error::InvalidDevice)?;
        match freed.kind {
            Kind::Pooled(pool) => {
                if let Some(pool) = self.pools.get_mut(&pool) {
                    pool.give(freed.charged);
                }
            }
            _ => device.give(freed.charged),
        }
        Ok(Some(freed))
    }

    /// Registers host memory of the program.
    pub fn register(&mut self, base: u64, size: u64, ordinal: usize) -> Result<()> {
        self.memory.register(base, size, ordinal)
    }

    /// Takes a registration back.
    pub fn unregister(&mut self, base: u64) -> Result<Freed> {
        self.memory.unregister(base)
    }

    /// What an address belongs to; reserved addresses count only where something is mapped.
    pub fn pointee(&self, address: u64) -> Option<Pointee> {
        let (base, size, allocation) = self.memory.find(address)?;
        if allocation.kind == Kind::Reserved {
            let (base, size, device) = self.vmm.find(address)?;
            return Some(Pointee { base, size, device, kind: Kind::Device });
        }
        Some(Pointee { base, size, device: allocation.device, kind: allocation.kind })
    }

    /// Whether a range is one piece of memory-file-backed device memory, so that its pages can be zeroed by dropping.
    pub fn is_droppable(&self, base: u64, size: u64) -> bool {
        self.memory.is_file_backed(base, size) || self.vmm.all_mapped(base, size)
    }

    /// Storage of a `__device__` variable on a device, made on first use.
    pub fn symbol(&mut self, key: u64, size: u64, ordinal: usize) -> Result<u64> {
        if let Some(&base) = self.symbols.get(&(key, ordinal)) {
            return Ok(base);
        }
        let base = self.memory.allocate(size, ordinal, Kind::Symbol, 0)?;
        self.symbols.insert((key, ordinal), base);
        Ok(base)
    }

    // ---------- between processes ----------

    /// Names an allocation for another process.
    pub fn share(&self, address: u64) -> Result<MemHandle> {
        let (extent, ordinal) = self.memory.extent_of(address)?;
        let physical = self.devices.get(ordinal).ok_or(Error::InvalidDevice)?.physical;
        Ok(MemHandle::of(extent, physical))
    }

    /// Maps what another process named.
    pub fn open_import(&mut self, handle: &MemHandle, ordinal: usize) -> Result<u64> {
        if handle.pid == std::process::id() {
            return Err(Error::InvalidValue);
        }
        let extent = handle.open().map_err(|_| Error::InvalidValue)?;
        self.memory.import(extent, ordinal)
    }

    // ---------- arrays ----------

    /// A CUDA array; gives its handle and bytes.
    pub fn create_array(&mut self, ordinal: usize, shape: Shape) -> Result<(u64, u64)> {
        let bytes = shape.bytes()?;
        let charged = charge(bytes);
        self.device(ordinal)?.take(charged)?;
        let handle = self.handles.deal(HandleKind::Array);
        self.arrays.insert(handle, Array { device: ordinal, bytes, charged });
        Ok((handle, bytes))
    }

    /// Ends an array; gives its device and bytes.
    pub fn destroy_array(&mut self, handle: u64) -> Result<(usize, u64)> {
        let array = self.arrays.remove(&handle).ok_or(Error::InvalidHandle)?;
        self.device(array.device)?.give(array.charged);
        Ok((array.device, array.bytes))
    }

    // ---------- pools ----------

    /// The handle of a device's default pool.
    pub fn default_pool(ordinal: usize) -> u64 {
        fixed(HandleKind::Pool, (1 << 32) + ordinal as u64)
    }

    /// The pool `cuMemAllocAsync` takes from on a device.
    pub fn current_pool(&self, ordinal: usize) -> Result<u64> {
        self.current_pools.get(ordinal).copied().ok_or(Error::InvalidDevice)
    }

    /// Sets that pool.
    pub fn set_current_pool(&mut self, ordinal: usize, pool: u64) -> Result<()> {
        self.pool(pool)?;
        *self.current_pools.get_mut(ordinal).ok_or(Error::InvalidDevice)? = pool;
        Ok(())
    }

    /// A new pool.
    pub fn create_pool(&mut self, ordinal: usize) -> Result<u64> {
        self.device(ordinal)?;
        let handle = self.handles.deal(HandleKind::Pool);
        self.pools.insert(handle, Pool::new(ordinal));
        Ok(handle)
    }

    /// A pool by its handle, to look at or set.
    pub fn pool(&mut self, handle: u64) -> Result<&mut Pool> {
        self.pools.get_mut(&handle).ok_or(Error::InvalidValue)
    }

    /// Gives a pool's unused memory back, down to `keep` bytes.
    pub fn trim_pool(&mut self, handle: u64, keep: u64) -> Result<()> {
        let pool = self.pools.get_mut(&handle).ok_or(Error::InvalidValue)?;
        let device = self.devices.get_mut(pool.device).ok_or(Error::InvalidDevice)?;
        pool.trim(keep, device);
        Ok(())
    }

    /// The host has waited for a stream, an event or a device.
    pub fn synchronized(&mut self) {
        for pool in self.pools.values_mut() {
            if let Some(device) = self.devices.get_mut(pool.device) {
                pool.synchronized(device);
            }
        }
    }

    /// Ends a pool. What is still allocated of it keeps its memory until it is freed.
    pub fn destroy_pool(&mut self, handle: u64) -> Result<()> {
        self.trim_pool(handle, 0)?;
        if self.pool(handle)?.usage().used == 0 {
            self.pools.remove(&handle);
        }
        Ok(())
    }

    // ---------- virtual memory management ----------

    /// Reserves addresses.
    pub fn reserve(&mut self, size: u64, align: u64, ordinal: usize) -> Result<u64> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) || (align != 0 && !align.is_power_of_two()) {
            return Err(Error::InvalidValue);
        }
        self.memory.reserve(size, align.max(GRANULARITY), ordinal)
    }

    /// Gives reserved addresses back; refused while something is mapped in them.
    pub fn unreserve(&mut self, base: u64, size: u64) -> Result<()> {
        match self.memory.find(base) {
            Some((b, s, a)) if b == base && s == size && a.kind == Kind::Reserved => {}
            _ => return Err(Error::InvalidValue),
        }
        if self.vmm.any_mapped(base, size) {
            return Err(Error::InvalidValue);
        }
        self.memory.free(base, |kind| kind == Kind::Reserved).map(drop)
    }

    /// Physical memory; gives its handle.
    pub fn create_physical(&mut self, request: PhysicalRequest) -> Result<u64> {
        let PhysicalRequest { size, device, shareable, properties } = request;
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(Error::InvalidValue);
        }
        let charged = if device.is_some() { size } else { 0 };
        let ordinal = device.unwrap_or(0);
        self.device(ordinal)?.take(charged)?;
        let extent = match self.memory.physical(size, shareable) {
            Ok(extent) => extent,
            Err(error) => {
                self.device(ordinal)?.give(charged);
                return Err(error);
            }
        };
        let handle = self.handles.deal(HandleKind::Physical);
        self.vmm.create(handle, extent, ordinal, charged, properties);
        Ok(handle)
    }

    /// The physical memory of a handle.
    pub fn physical(&self, handle: u64) -> Result<&Physical> {
        self.vmm.get(handle)
    }

    /// Physical memory that came from another process as a file.
    pub fn import_physical(&mut self, extent: backing::Extent, ordinal: usize) -> u64 {
        let handle = self.handles.deal(HandleKind::Physical);
        // Pinned memory at a location, which is a device.
        self.vmm.create(handle, extent, ordinal, 0, [1, 1 | (ordinal as u64) << 32, 0, 0]);
        handle
    }

    /// Gives a handle back; gives the bytes and device of the memory it named.
    pub fn release_physical(&mut self, handle: u64) -> Result<(u64, usize)> {
        let physical = self.vmm.get(handle)?;
        let told = (physical.extent.size, physical.device);
        if let Some(unused) = self.vmm.release(handle)? {
            self.settle(&unused)?;
        }
        Ok(told)
    }

    /// One more reference to the memory mapped at an address.
    pub fn retain_physical(&mut self, address: u64) -> Result<u64> {
        self.vmm.retain(address)
    }

    fn settle(&mut self, unused: &Physical) -> Result<()> {
        self.device(unused.device)?.give(unused.charged);
        if unused.charged > 0 {
            unused.extent.punch();
        }
        Ok(())
    }

    /// Maps physical memory into reserved addresses; nothing may be accessed until access is set. Gives the device.
    pub fn map(&mut self, base: u64, size: u64, mapping: Mapping) -> Result<usize> {
        let aligned = |n: u64| n.is_multiple_of(GRANULARITY);
        match self.memory.find(base) {
            Some((b, s, a)) if a.kind == Kind::Reserved && aligned(base) && size <= s - (base - b) => {}
            _ => return Err(Error::InvalidValue),
        }
        if size == 0 || !aligned(size) || !aligned(mapping.offset) {
            return Err(Error::InvalidValue);
        }
        self.vmm.map(base, size, mapping)?;
        let physical = self.vmm.get(mapping.handle)?;
        let device = physical.device;
        let mapped = backing::map_at(base, size, &physical.extent, mapping.offset)
            .and_then(|()| backing::protect(base, size, false));
        if mapped.is_err() {
            self.vmm.unmap(base, size)?;
            return Err(Error::MapFailed);
        }
        Ok(device)
    }

    /// Gives access to mapped memory, or takes it.
    pub fn set_access(&self, base: u64, size: u64, accessible: bool) -> Result<()> {
        if !self.vmm.all_mapped(base, size) {
            return Err(Error::InvalidValue);
        }
        backing::protect(base, size, accessible).map_err(|_| Error::InvalidValue)
    }

    /// Undoes mappings. Gives the device.
    pub fn unmap(&mut self, base: u64, size: u64) -> Result<Option<usize>> {
        let device = self.vmm.find(base).map(|f| f.2);
        let unused = self.vmm.unmap(base, size)?;
        backing::unmap_to_reserved(base, size);
        for physical in &unused {
            self.settle(physical)?;
        }
        Ok(device)
    }

    // ---------- work ----------

    /// The capture a stream takes part in, if it is still going on.
    pub fn capture_of(&mut self, stream: u64, current: usize) -> Result<Option<Capture>> {
        let stream = self.streams.get_mut(stream, current)?;
        let live = stream.capture.and_then(|id| self.graphs.capture(id));
        stream.capture = live.map(|c| c.id);
        Ok(live)
    }

    /// One unit of work for a stream: counted, or recorded as a node. Gives whether it is to be done now.
    pub fn launch(&mut self, stream: u64, current: usize, now: u64) -> Result<bool> {
        self.launches += 1;
        if let Some(capture) = self.capture_of(stream, current)? {
            self.graphs.add_node(capture.id);
            return Ok(false);
        }
        let time = self.config.kernel_ns;
        if time > 0 {
            let stream = self.streams.get_mut(stream, current)?;
            stream.busy_until = stream.busy_until.max(now) + time;
            let (busy_until, ordinal) = (stream.busy_until, stream.device);
            let device = self.device(ordinal)?;
            device.busy_until = device.busy_until.max(busy_until);
        }
        Ok(true)
    }

    /// Counts a call of a stub.
    pub fn stub(&mut self, name: &str) {
        *self.stubs.entry(name.to_string()).or_default() += 1;
    }
}
