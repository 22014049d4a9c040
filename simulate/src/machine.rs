//! The simulated machine: one value that owns all state. The driver keeps it behind one lock.

use crate::array::Shape;
use crate::backing::{self, Extent};
use crate::bridge::ListedProcess;
use crate::checkpoint::Gate;
use crate::config::{Config, MIB};
use crate::context::Contexts;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::graph::{Capture, Graphs, Instance};
use crate::handle::{Handles, Kind as HandleKind, fixed};
use crate::ipc::MemHandle;
use crate::ledger::Ledger;
use crate::library_memory::Kernels;
use crate::loading::Loading;
use crate::memory::{Freed, Kind, Memory, charge};
use crate::missing::MissingFunctions;
use crate::pool::Pool;
use crate::shared::SharedUsage;
use crate::stream::Streams;
use crate::vmm::{Mapping, Physical, Vmm};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The granularity of sizes for physical memory and address ranges, in bytes.
pub const GRANULARITY: u64 = 2 * MIB;

/// The arguments of `cuMemCreate`.
#[derive(Clone, Copy, Debug)]
pub struct PhysicalRequest {
    /// The size in bytes.
    pub size: u64,
    /// The device ordinal, or `None` for host memory.
    pub device: Option<usize>,
    /// Whether the memory can be exported as a file descriptor.
    pub shareable: bool,
    /// The allocation properties, kept so that the program can query them.
    pub properties: [u64; 4],
}

/// The allocation that contains an address, as `cuPointerGetAttribute` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointee {
    /// The first address of the allocation.
    pub base: u64,
    /// The size of the allocation in bytes.
    pub size: u64,
    /// The device ordinal.
    pub device: usize,
    /// The kind of memory.
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug)]
struct Array {
    device: usize,
    bytes: u64,
    charged: u64,
}

/// All state of the simulation in this process.
#[derive(Debug)]
pub struct Machine {
    /// The settings.
    pub config: Config,
    /// The visible devices, indexed by the program's ordinals.
    pub devices: Vec<Device>,
    /// Streams and events.
    pub streams: Streams,
    /// Contexts other than the primary ones.
    pub contexts: Contexts,
    /// Captures and graphs.
    pub graphs: Graphs,
    /// The kernels and modules on the devices.
    pub loading: Loading,
    /// Where the calls of this process wait while it is suspended. `None` where processes share no folder.
    pub gate: Option<Gate>,
    /// The ledger of all allocations and frees.
    pub ledger: Ledger,
    /// Issues handles.
    pub handles: Handles,
    /// The number of calls of each stub, by name.
    pub stubs: BTreeMap<String, u64>,
    missing: MissingFunctions,
    /// The number of launches, copies and sets so far.
    pub launches: u64,
    memory: Memory,
    vmm: Vmm,
    pools: HashMap<u64, Pool>,
    current_pools: Vec<u64>,
    arrays: HashMap<u64, Array>,
    symbols: HashMap<(u64, usize), u64>,
}

impl Machine {
    /// Creates a machine from its settings.
    pub fn new(mut config: Config) -> Self {
        let shared = config.shared.as_deref().map(SharedUsage::new);
        let device = |physical| {
            Device::new(physical, config.memory_bytes, shared.clone())
                .with_others(&config.other_processes, config.mig)
                .with_shared_pages(config.library_memory)
                .with_spilling(config.spills)
        };
        let devices: Vec<Device> = config.visible.iter().copied().map(device).collect();
        let mut handles = Handles::default();
        let pools = (0..devices.len()).map(|d| (Self::default_pool(d), Pool::new(d))).collect();
        Machine {
            streams: Streams::new(devices.len(), &mut handles),
            contexts: Contexts::default(),
            graphs: Graphs::default(),
            loading: Loading::default(),
            gate: config.shared.as_deref().and_then(Gate::new),
            ledger: Ledger::new(config.ledger.take()),
            stubs: BTreeMap::new(),
            missing: MissingFunctions::new(config.missing.take()),
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

    /// The device with this ordinal. Fails with `InvalidDevice` when there is none.
    pub fn device(&mut self, ordinal: usize) -> Result<&mut Device> {
        self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)
    }

    /// The processes that use a device, by its physical ordinal. Hidden devices are known only where processes share
    /// them.
    pub fn processes(&self, physical: u32) -> Vec<ListedProcess> {
        let visible = self.devices.iter().find(|device| device.physical == physical);
        let hidden =
            || Device::new(physical, self.config.memory_bytes, self.config.shared.as_deref().map(SharedUsage::new));
        let (others, mig) = (&self.config.other_processes, self.config.mig);
        let of_memory = visible.map_or_else(|| hidden().with_others(others, mig).processes(), Device::processes);
        // Those in other instances use other memory.
        let of_other_memory = others.iter().filter(|other| other.device == physical && !other.shares_memory(mig));
        let all = of_memory.into_iter().chain(of_other_memory.map(|other| (other.pid, other.bytes)));
        let listed = all.map(|(pid, bytes)| {
            let other = others.iter().find(|other| other.pid == pid);
            let instance = other.map_or(mig.instance(), |other| other.instance);
            ListedProcess {
                pid,
                bytes,
                is_mps: other.is_some_and(|other| other.is_mps),
                instance: instance.unwrap_or(ListedProcess::NO_INSTANCE),
            }
        });
        listed.collect()
    }

    /// The path of the program of a process that is no part of the simulation. `None` for other processes.
    pub fn other_process_name(&self, pid: u32) -> Option<&str> {
        self.config.other_processes.iter().find(|process| process.pid == pid).map(|process| &*process.name)
    }

    /// Loads kernels onto a device if they are not there yet, where these take memory.
    pub fn load(&mut self, ordinal: usize, kernels: Kernels) -> Result<()> {
        let device = self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)?;
        self.loading.load(&self.config, (ordinal, device), kernels)
    }

    /// Creates a stream and returns its handle.
    pub fn create_stream(&mut self, ordinal: usize, flags: u32, priority: i32) -> Result<u64> {
        let device = self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)?;
        self.loading.add_stream(&self.config, (ordinal, device))?;
        Ok(self.streams.create(ordinal, flags, priority, &mut self.handles))
    }

    /// Destroys a stream. Default streams cannot be destroyed.
    pub fn destroy_stream(&mut self, handle: u64) -> Result<()> {
        let ordinal = self.streams.get(handle, 0)?.device;
        self.streams.destroy(handle)?;
        self.loading.remove_stream(ordinal);
        Ok(())
    }

    /// Loads the kernels of a module onto a device if they are not there yet.
    pub fn load_module(&mut self, ordinal: usize, module: u64) -> Result<()> {
        let device = self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)?;
        self.loading.load_module((ordinal, device), module)
    }

    /// Creates the device's primary context if it does not exist, and charges its memory to the device.
    pub fn activate(&mut self, ordinal: usize) -> Result<()> {
        let bytes = self.config.context_bytes;
        let device = self.device(ordinal)?;
        if !device.primary_active {
            device.take(bytes)?;
            device.primary_active = true;
        }
        Ok(())
    }

    /// Creates a context in addition to the primary one and returns its handle.
    pub fn create_context(&mut self, ordinal: usize) -> Result<u64> {
        let bytes = self.config.context_bytes;
        self.device(ordinal)?.take(bytes)?;
        Ok(self.contexts.create(ordinal, &mut self.handles))
    }

    /// Destroys a context that [`Self::create_context`] created.
    pub fn destroy_context(&mut self, handle: u64) -> Result<()> {
        let ordinal = self.contexts.destroy(handle)?;
        let bytes = self.config.context_bytes;
        self.device(ordinal)?.give(bytes);
        Ok(())
    }

    /// Instantiates a graph, charges its memory to the device, and returns the handle of the instance.
    pub fn instantiate_graph(&mut self, handle: u64, ordinal: usize) -> Result<u64> {
        let graph = self.graphs.graph(handle)?;
        let bytes = graph.nodes.saturating_mul(self.config.graph_node_bytes);
        self.device(ordinal)?.take(bytes)?;
        Ok(self.graphs.add_instance(Instance { graph, ordinal, bytes }, &mut self.handles))
    }

    /// Destroys an instance that [`Self::instantiate_graph`] made.
    pub fn destroy_graph_instance(&mut self, handle: u64) -> Result<()> {
        let instance = self.graphs.remove_instance(handle)?;
        self.device(instance.ordinal)?.give(instance.bytes);
        Ok(())
    }

    // ---------- memory with an address ----------

    /// Allocates `size` bytes of device memory and returns the address.
    pub fn allocate(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        let cost = charge(size);
        self.device(ordinal)?.take_block(cost)?;
        let allocated = self.memory.allocate(size, ordinal, Kind::Device, cost);
        if allocated.is_err() {
            self.device(ordinal)?.give_block(cost);
        }
        allocated
    }

    /// Allocates `size` bytes of managed memory. In this simulation it takes no device memory.
    pub fn allocate_managed(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        self.memory.allocate(size, ordinal, Kind::Managed, 0)
    }

    /// Allocates `size` bytes of page-locked host memory.
    pub fn allocate_host(&mut self, ordinal: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::InvalidValue);
        }
        self.memory.allocate_host(size, ordinal)
    }

    /// Allocates `size` bytes from a pool.
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

    /// `cuMemFree`: frees device, managed or pooled memory. A null address has no effect and gives `None`.
    pub fn free(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| matches!(kind, Kind::Device | Kind::Managed | Kind::Pooled(_)))
    }

    /// `cuMemFreeAsync`: frees pooled memory only.
    pub fn free_pooled(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| matches!(kind, Kind::Pooled(_)))
    }

    /// `cuMemFreeHost`: frees page-locked host memory.
    pub fn free_host(&mut self, base: u64) -> Result<Option<Freed>> {
        self.free_kind(base, |kind| kind == Kind::Host)
    }

    /// `cuIpcCloseMemHandle`: unmaps memory of another process.
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
            _ => device.give_block(freed.charged),
        }
        Ok(Some(freed))
    }

    /// Registers `size` bytes of the program's own host memory at `base`.
    pub fn register(&mut self, base: u64, size: u64, ordinal: usize) -> Result<()> {
        self.memory.register(base, size, ordinal)
    }

    /// Removes a registration of host memory.
    pub fn unregister(&mut self, base: u64) -> Result<Freed> {
        self.memory.unregister(base)
    }

    /// The allocation that contains an address. A reserved address has one only where memory is mapped.
    pub fn pointee(&self, address: u64) -> Option<Pointee> {
        let (base, size, allocation) = self.memory.find(address)?;
        if allocation.kind == Kind::Reserved {
            let (base, size, device) = self.vmm.find(address)?;
            return Some(Pointee { base, size, device, kind: Kind::Device });
        }
        Some(Pointee { base, size, device: allocation.device, kind: allocation.kind })
    }

    /// The parts of `[base, base + size)` to which something was written, as addresses. All else is zeros, and its
    /// pages are not committed. `None` if a part of it is not device memory.
    pub fn written(&self, base: u64, size: u64) -> Option<Vec<Range<u64>>> {
        let end = base.checked_add(size)?;
        let (mut at, mut parts) = (base, Vec::new());
        while at < end {
            let (extent, start, until) = self.extent_at(at)?;
            let until = until.min(end);
            let written = extent.written(at.wrapping_sub(start), until.wrapping_sub(start));
            parts.extend(written.into_iter().map(|part| start.wrapping_add(part.start)..start.wrapping_add(part.end)));
            at = until;
        }
        Some(parts)
    }

    /// Whether a range is device memory. Its pages can then be zeroed by dropping them.
    pub fn is_droppable(&self, base: u64, size: u64) -> bool {
        let Some(end) = base.checked_add(size) else { return false };
        let mut at = base;
        while at < end {
            match self.extent_at(at) {
                Some((_, _, until)) => at = until,
                None => return false,
            }
        }
        true
    }

    /// The extent behind an address of device memory, the address at which the extent begins, and the address up to
    /// which it is mapped.
    fn extent_at(&self, address: u64) -> Option<(&Extent, u64, u64)> {
        let own = self.memory.extent_at(address).map(|(extent, base)| (extent, base, base + extent.size));
        own.or_else(|| self.vmm.extent_at(address))
    }

    /// The address of a `__device__` variable on a device. The first use allocates its storage.
    pub fn symbol(&mut self, key: u64, size: u64, ordinal: usize) -> Result<u64> {
        if let Some(&base) = self.symbols.get(&(key, ordinal)) {
            return Ok(base);
        }
        let base = self.memory.allocate(size, ordinal, Kind::Symbol, 0)?;
        self.symbols.insert((key, ordinal), base);
        Ok(base)
    }

    // ---------- between processes ----------

    /// Creates an IPC handle for an allocation.
    pub fn share(&self, address: u64) -> Result<MemHandle> {
        let (extent, ordinal) = self.memory.extent_of(address)?;
        let physical = self.devices.get(ordinal).ok_or(Error::InvalidDevice)?.physical;
        Ok(MemHandle::of(extent, physical))
    }

    /// Maps an allocation of another process. Fails for a handle of this process, as the real driver does.
    pub fn open_import(&mut self, handle: &MemHandle, ordinal: usize) -> Result<u64> {
        if handle.pid == std::process::id() {
            return Err(Error::InvalidValue);
        }
        let is_own = self.config.visible.get(ordinal) == Some(&handle.device);
        if !is_own && !self.config.model.has_peer_access() {
            return Err(Error::PeerAccessUnsupported);
        }
        let extent = handle.open().map_err(|_| Error::InvalidValue)?;
        self.memory.import(extent, ordinal)
    }

    // ---------- arrays ----------

    /// Creates a CUDA array. Returns its handle and its size in bytes.
    pub fn create_array(&mut self, ordinal: usize, shape: Shape) -> Result<(u64, u64)> {
        let bytes = shape.bytes()?;
        let charged = charge(bytes);
        self.device(ordinal)?.take_block(charged)?;
        let handle = self.handles.deal(HandleKind::Array);
        self.arrays.insert(handle, Array { device: ordinal, bytes, charged });
        Ok((handle, bytes))
    }

    /// Destroys an array. Returns its device ordinal and its size in bytes.
    pub fn destroy_array(&mut self, handle: u64) -> Result<(usize, u64)> {
        let array = self.arrays.remove(&handle).ok_or(Error::InvalidHandle)?;
        self.device(array.device)?.give_block(array.charged);
        Ok((array.device, array.bytes))
    }

    // ---------- pools ----------

    /// The handle of a device's default pool.
    pub fn default_pool(ordinal: usize) -> u64 {
        fixed(HandleKind::Pool, (1 << 32) + ordinal as u64)
    }

    /// The pool from which `cuMemAllocAsync` allocates on this device.
    pub fn current_pool(&self, ordinal: usize) -> Result<u64> {
        self.current_pools.get(ordinal).copied().ok_or(Error::InvalidDevice)
    }

    /// Sets the pool from which `cuMemAllocAsync` allocates on this device.
    pub fn set_current_pool(&mut self, ordinal: usize, pool: u64) -> Result<()> {
        self.pool(pool)?;
        *self.current_pools.get_mut(ordinal).ok_or(Error::InvalidDevice)? = pool;
        Ok(())
    }

    /// Creates a pool on a device and returns its handle.
    pub fn create_pool(&mut self, ordinal: usize) -> Result<u64> {
        self.device(ordinal)?;
        let handle = self.handles.deal(HandleKind::Pool);
        self.pools.insert(handle, Pool::new(ordinal));
        Ok(handle)
    }

    /// The pool with this handle. Fails with `InvalidValue` when there is none.
    pub fn pool(&mut self, handle: u64) -> Result<&mut Pool> {
        self.pools.get_mut(&handle).ok_or(Error::InvalidValue)
    }

    /// Returns a pool's unused memory to its device, but keeps `keep` bytes reserved.
    pub fn trim_pool(&mut self, handle: u64, keep: u64) -> Result<()> {
        let pool = self.pools.get_mut(&handle).ok_or(Error::InvalidValue)?;
        let device = self.devices.get_mut(pool.device).ok_or(Error::InvalidDevice)?;
        pool.trim(keep, device);
        Ok(())
    }

    /// Trims every pool to its release threshold, after the host has waited for a stream, an event or a device.
    pub fn synchronized(&mut self) {
        for pool in self.pools.values_mut() {
            if let Some(device) = self.devices.get_mut(pool.device) {
                pool.synchronized(device);
            }
        }
    }

    /// Destroys a pool. Allocations that still exist keep their memory until they are freed.
    pub fn destroy_pool(&mut self, handle: u64) -> Result<()> {
        self.trim_pool(handle, 0)?;
        if self.pool(handle)?.usage().used == 0 {
            self.pools.remove(&handle);
        }
        Ok(())
    }

    // ---------- virtual memory management ----------

    /// Reserves addresses. `size` is a multiple of [`GRANULARITY`], and `align` is a power of two or 0.
    pub fn reserve(&mut self, size: u64, align: u64, ordinal: usize) -> Result<u64> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) || (align != 0 && !align.is_power_of_two()) {
            return Err(Error::InvalidValue);
        }
        self.memory.reserve(size, align.max(GRANULARITY), ordinal)
    }

    /// Releases reserved addresses. Fails while memory is mapped in them.
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

    /// Allocates physical memory and returns its handle.
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

    /// Registers physical memory that another process exported as a file, and returns its handle.
    pub fn import_physical(&mut self, extent: Extent, ordinal: usize) -> u64 {
        let handle = self.handles.deal(HandleKind::Physical);
        // The properties of pinned memory (1) at a location of type device (1).
        self.vmm.create(handle, extent, ordinal, 0, [1, 1 | (ordinal as u64) << 32, 0, 0]);
        handle
    }

    /// Releases a handle. Returns the size in bytes and the device of its memory.
    pub fn release_physical(&mut self, handle: u64) -> Result<(u64, usize)> {
        let physical = self.vmm.get(handle)?;
        let memory = (physical.extent.size, physical.device);
        if let Some(unused) = self.vmm.release(handle)? {
            self.settle(&unused)?;
        }
        Ok(memory)
    }

    /// Adds a reference to the memory that is mapped at an address, and returns its handle.
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

    /// Maps physical memory into reserved addresses and returns the device.
    ///
    /// The memory cannot be accessed before [`Self::set_access`].
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

    /// Allows or forbids access to mapped memory.
    pub fn set_access(&self, base: u64, size: u64, accessible: bool) -> Result<()> {
        if !self.vmm.all_mapped(base, size) {
            return Err(Error::InvalidValue);
        }
        backing::protect(base, size, accessible).map_err(|_| Error::InvalidValue)
    }

    /// Removes mappings and returns the device of the first one.
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

    /// The running capture in which a stream takes part, if any.
    pub fn capture_of(&mut self, stream: u64, current: usize) -> Result<Option<Capture>> {
        let stream = self.streams.get_mut(stream, current)?;
        let live = stream.capture.and_then(|id| self.graphs.capture(id));
        stream.capture = live.map(|c| c.id);
        Ok(live)
    }

    /// Adds one unit of work to a stream: as a node of a running capture, or as work to do now.
    ///
    /// Returns whether the caller must do the work now.
    pub fn launch(&mut self, stream: u64, current: usize, now: u64) -> Result<bool> {
        self.launches += 1;
        let ordinal = self.streams.get_mut(stream, current)?.device;
        let device = self.devices.get_mut(ordinal).ok_or(Error::InvalidDevice)?;
        self.loading.resize_local_memory(&self.config, (ordinal, device))?;
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
        self.missing.add(name);
    }
}
