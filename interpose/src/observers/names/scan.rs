//! One scan: which objects it visits, and what it remembers for the next.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use memtrace_stackwalk::CheckedMemory;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{NoticeStatus, TRAINING_TOPIC};
use memtrace_trace::options::Cpu;

use super::address_hash::{BuildAddressHasher, Parameters};
use super::object_id::ObjectId;
use super::reported::Reported;
use super::roots::{self, Root};
use super::schedule::{Scan, ScanInputs, Schedule};
use super::step_sites::StepSites;
use super::walk::{ModelWalk, WalkResult};
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::GilToken;
use crate::observers::tensors::{TensorLayout, TorchSymbols};
use crate::recording::device_use;
use crate::recording::guard::Guard;
use crate::recording::process::Process;
use crate::torch::gc;

/// How many scans are postponed at most because a constructor is running.
const MAX_POSTPONED: u32 = 16;
/// At most this many modules are remembered as scanned.
const MAX_MODULES: usize = 1 << 16;
/// At most this many models and optimizers are scanned again. In a program with more, every scan is a heap scan.
const MAX_RESCANNED: usize = 256;
/// After this many device tensors that do not confirm the layout, name reading is switched off.
const MAX_MISSES: u32 = 256;

/// Why a scan was requested.
#[derive(Clone, Copy)]
pub(super) struct ScanRequest<'a> {
    /// A set of bits ([`super::schedule::cause`]).
    pub(super) causes: u8,
    /// Whether the program has run a backward pass or an optimizer step.
    pub(super) is_training: bool,
    /// Whether an allocation has failed.
    pub(super) has_failed: bool,
    pub(super) step_sites: &'a StepSites,
}

/// The state that one scan keeps for the next.
#[derive(Default)]
pub(super) struct ScanState {
    torch: Option<TorchSymbols>,
    schedule: Schedule,
    compared_calls: usize,
    postponed: u32,
    /// Whether the recording says that the program has an optimizer.
    has_optimizer: bool,
    objects: KnownObjects,
    tensors: TensorNames,
}

/// The program's objects that scans have found.
#[derive(Default)]
struct KnownObjects {
    /// The models. They were alive at the last scan.
    roots: Vec<Root>,
    optimizers: Vec<ObjectId>,
    /// The objects of the modules that scans have seen.
    modules: HashSet<usize, BuildAddressHasher>,
    /// Set if there are more models and optimizers than [`MAX_RESCANNED`].
    has_too_many: bool,
}

/// How tensors are read, and their names.
#[derive(Default)]
struct TensorNames {
    layout: Option<TensorLayout>,
    reported: Reported,
    /// Maps the object of each parameter that an optimizer has to its name. A parameter that is temporarily outside its
    /// module (FSDP moves them) keeps its name.
    parameters: Parameters,
    /// How many tensors did not confirm the layout.
    misses: u32,
}

impl TensorNames {
    /// Stores the result of a walk. The error is the reason why names cannot be read.
    fn take(&mut self, result: WalkResult) -> Result<(), &'static str> {
        self.misses += result.misses;
        self.parameters = result.parameters;
        if let Some(reason) = result.layout_error {
            return Err(reason);
        }
        let is_readable = self.misses < MAX_MISSES || self.layout.is_some();
        is_readable.then_some(()).ok_or("no tensor has the expected layout")
    }
}

/// The objects that a heap scan has listed.
struct ListedObjects {
    modules: Vec<PyObjectPtr>,
    optimizers: Vec<PyObjectPtr>,
}

/// How many events have been recorded.
fn event_count(process: &Process) -> u64 {
    process.segment.header().next_seq.0.load(Ordering::Relaxed)
}

impl ScanState {
    /// Scans the program's objects as requested. Returns the extent of the scan, or the reason why there can be none.
    pub(super) fn scan(
        &mut self,
        process: &'static Process,
        gil: GilToken<'_>,
        request: ScanRequest<'_>,
    ) -> Result<Scan, &'static str> {
        let Some(module) = gil.class(c"torch.nn.modules.module", c"Module") else { return Ok(Scan::Nothing) };
        let optimizer = gil.class(c"torch.optim.optimizer", c"Optimizer");
        if self.torch.is_none() {
            self.torch = Some(TorchSymbols::find()?);
        }
        let events = event_count(process);
        let scan = self.decide(process, request, events);
        if scan == Scan::Nothing || scan == Scan::Heap && self.waits_for_model(process, request) {
            return Ok(Scan::Nothing);
        }
        let Some(_gc_paused) = gil.pause_gc() else { return Err("the garbage collector cannot be paused") };
        let mut listed = None;
        if scan == Scan::Heap {
            let found = ListedObjects::find(gil, module, optimizer)?;
            self.schedule.heap_scan_done(events, request.is_training);
            self.objects.modules = found.modules.iter().map(|module| module.addr()).collect();
            if !self.has_optimizer
                && !found.optimizers.is_empty()
                && let Some(mut guard) = Guard::enter()
            {
                guard.notice(TRAINING_TOPIC, NoticeStatus::Remark, "the program has an optimizer");
                self.has_optimizer = true;
            }
            listed = Some(found);
        }
        let seq = event_count(process).saturating_sub(1);
        let ScanState { torch: Some(torch), objects, tensors, .. } = self else { return Ok(Scan::Nothing) };
        let TensorNames { layout, reported, parameters, .. } = tensors;
        reported.begin(&process.watch);
        let walk = ModelWalk::new(gil, torch, layout, module, records_cpu(process), reported, parameters)
            .ok_or("the interpreter is out of memory")?;
        let mut result = objects.visit_all(gil, walk, listed);
        objects.remember(std::mem::take(&mut result.seen));
        process.count(Counter::NamesDropped, result.dropped);
        tensors.take(result)?;
        tensors.reported.write(process, seq, tensors.layout.is_some());
        Ok(scan)
    }

    /// Decides on the extent of the scan. Forgets known objects that are gone, so that nothing touches them.
    fn decide(&mut self, process: &Process, request: ScanRequest<'_>, events: u64) -> Scan {
        let has_changed = self.is_changed(process, request.step_sites) || self.objects.has_too_many;
        let scan = self.schedule.decide(request.causes, ScanInputs { events, has_changed });
        if scan == Scan::Nothing || !self.objects.forget_freed() {
            return scan;
        }
        // The objects that replace them are unknown.
        self.schedule.decide(0, ScanInputs { events, has_changed: true }).max(scan)
    }

    /// Whether a module was called that no scan has seen, or an optimizer was stepped at a new call site.
    fn is_changed(&mut self, process: &Process, step_sites: &StepSites) -> bool {
        let calls = &process.module_calls;
        let from = std::mem::replace(&mut self.compared_calls, calls.count());
        let is_new_module = calls.objects_from(from).any(|object| !self.objects.modules.contains(&object));
        let is_new_site = step_sites.take_new().is_some_and(|count| count > self.objects.optimizers.len());
        is_new_module || is_new_site
    }

    /// Whether a heap scan is postponed because a model is under construction, which has no names yet. A program that
    /// has called a module has a model: inference servers load and profile one in their own `__init__`.
    fn waits_for_model(&mut self, process: &Process, request: ScanRequest<'_>) -> bool {
        let can_wait = !request.is_training && !request.has_failed && self.postponed < MAX_POSTPONED;
        let waits = can_wait && process.module_calls.count() == 0 && is_in_function(process, "__init__");
        self.postponed += u32::from(waits);
        waits
    }
}

/// Whether this thread is inside a Python function of this name. The frames are read in place, because CPython would
/// materialize frame objects that outlive the request.
fn is_in_function(process: &Process, name: &str) -> bool {
    process.python().is_some_and(|python| python.is_in_function(name))
}

/// Whether tensors on the CPU are recorded.
fn records_cpu(process: &Process) -> bool {
    match process.options.cpu {
        Cpu::Always => true,
        Cpu::Auto => !device_use::is_in_use(),
        Cpu::Never => false,
    }
}

impl ListedObjects {
    /// Lists the program's modules and optimizers.
    fn find(
        gil: GilToken<'_>,
        module: PyObjectPtr,
        optimizer: Option<PyObjectPtr>,
    ) -> Result<ListedObjects, &'static str> {
        let (mut modules, mut optimizers) = (Vec::new(), Vec::new());
        let classes = [module, optimizer.unwrap_or(module)];
        let lists = Guard::enter().and_then(|mut guard| gc::list_heads(&mut guard));
        let is_listed = gil.instances(&classes, lists, &mut |which, object| {
            if which == 0 { modules.push(object) } else { optimizers.push(object) }
        });
        is_listed
            .then_some(ListedObjects { modules, optimizers })
            .ok_or("the garbage collector's objects cannot be listed")
    }
}

impl KnownObjects {
    /// Forgets models and optimizers that no longer exist. Returns whether there were any.
    fn forget_freed(&mut self) -> bool {
        let before = self.roots.len() + self.optimizers.len();
        if before == 0 {
            return false;
        }
        match CheckedMemory::open() {
            Ok(memory) => {
                self.roots.retain(|root| root.id.is_alive(&memory));
                self.optimizers.retain(|optimizer| optimizer.is_alive(&memory));
            }
            Err(_) => {
                self.roots.clear();
                self.optimizers.clear();
            }
        }
        self.roots.len() + self.optimizers.len() != before
    }

    /// Visits all models and optimizers, after replacing them by those that were listed.
    fn visit_all(
        &mut self,
        gil: GilToken<'_>,
        mut walk: ModelWalk<'_, '_>,
        listed: Option<ListedObjects>,
    ) -> WalkResult {
        let had_layout = walk.has_layout();
        if let Some(ListedObjects { modules, optimizers }) = listed {
            let found = walk.find_models(&modules);
            let before = std::mem::take(&mut self.roots);
            self.roots = roots::assign_prefixes(gil, &mut walk, &found, before);
            // SAFETY: the interpreter has just listed these objects, and this thread holds the GIL.
            self.optimizers = optimizers.into_iter().map(|object| unsafe { ObjectId::of(object) }).collect();
        }
        self.visit(&mut walk);
        if !had_layout && walk.has_layout() {
            // The layout was confirmed during this pass, so the tensors before that point have not been reported.
            walk.restart();
            self.visit(&mut walk);
        }
        walk.finish()
    }

    /// Visits the models and optimizers. Forgets modules without tensors, such as loss functions.
    fn visit(&mut self, walk: &mut ModelWalk<'_, '_>) {
        self.roots.retain(|root| {
            let before = walk.tensors_seen();
            walk.visit_model(root.id.object(), &root.prefix);
            walk.tensors_seen() != before
        });
        self.optimizers.iter().for_each(|optimizer| walk.visit_optimizer(optimizer.object()));
    }

    /// Remembers the modules that a walk has seen, within the limits.
    fn remember(&mut self, seen: HashSet<usize, BuildAddressHasher>) {
        self.modules.extend(seen);
        if self.modules.len() > MAX_MODULES {
            self.modules.clear();
        }
        self.has_too_many = self.roots.len() + self.optimizers.len() > MAX_RESCANNED;
        if self.has_too_many {
            self.roots.clear();
            self.optimizers.clear();
        }
    }
}
