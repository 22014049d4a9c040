//! Attributes backward allocations: which autograd node a thread is running, and which forward call created that node.
//!
//! libtorch_cpu calls these functions through its PLT, by the same names in every version from 2.4 to 2.15:
//!
//! - `at::sequence_number::get_and_increment()` runs on the forward thread when a node is created. The Python stack at
//!   that moment is remembered under (forward thread, number).
//! - `torch::autograd::AccumulateGrad::AccumulateGrad(at::Tensor)`: this node takes no number. The stack is remembered
//!   under the node's address, in a table of its own.
//! - `torch::autograd::Engine::evaluate_function(...)` runs one node. While it runs, allocations of this thread belong
//!   to the node.
//!
//! The layout of `Node` (torch/csrc/autograd/function.h, later node.h) is private; [`LAYOUTS`] has the candidates. A
//! layout is verified once the numbers found in nodes are numbers that were assigned. The vtable's type info names the
//! node's type. Nodes of Python's `autograd.Function` share one C++ type, so they are named by their Python class
//! ([`super::python_node`]).

use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_stackwalk::{Lock, MAX_STACKS};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus};
use memtrace_trace::ids::{ContextId, StackId};

use super::grad_mode;
use super::libraries::libtorch_cpu;
use super::python_node::PythonNodes;
use super::running_nodes::{node_ends, node_starts};
use crate::linker::original::OriginalFunction;
use crate::recording::attached;
use crate::recording::guard::Guard;
use crate::recording::module_calls::MAX_CALLS;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::recording::sparse_table::SparseTable;
use crate::recording::thread_local::with_thread_local;

/// Number of forward stacks that are remembered. A node older than this many later ones has lost its stack, which is
/// counted.
const FORWARD_SLOTS: usize = 1 << 20;
/// Buckets for the stacks of nodes without a number, by address. A full bucket overwrites an arbitrary entry.
const UNNUMBERED_BUCKETS: usize = 1 << 15;
const BUCKET: usize = 8;
/// How many distinct combinations of node type, forward stack and module get a context. Further nodes have none, which
/// is counted.
const CONTEXT_SLOTS: usize = 1 << 16;
/// From this many contexts on, new ones have no module. So a program that keeps creating modules leaves space for node
/// types and stacks.
const MAX_CONTEXTS_WITH_MODULE: u32 = CONTEXT_SLOTS as u32 / 2;
/// Autograd recording is switched off after this many nodes with unassigned numbers, if there was never one with an
/// assigned number.
const MAX_MISSES: u32 = 64;
/// Offsets of `sequence_nr_` and `thread_id_` in 8-byte words. They follow `std::enable_shared_from_this` (until 2.12)
/// or `c10::intrusive_ptr_target` (from 2.13 on).
const LAYOUTS: [(usize, usize); 2] = [(3, 6), (2, 5)];
/// The sequence number in an `AccumulateGrad`.
const NO_NUMBER: u64 = u64::MAX;

/// Words of a context: its type; its forward stack and its id; its module.
const WORDS: usize = 3;

/// Autograd's part of a recording.
pub(crate) const OBSERVER: Observer = Observer::with_state(|_, _| AUTOGRAD.set(AutogradRecorder::new()));

static AUTOGRAD: Slot<AutogradRecorder> = Slot::new();

/// The state of autograd recording in this process.
struct AutogradRecorder {
    forward: SparseTable<1>,
    unnumbered: SparseTable<BUCKET>,
    contexts: SparseTable<WORDS>,
    contexts_lock: Lock,
    context_count: AtomicU32,
    /// One more than the index of the verified layout in [`LAYOUTS`], 0 before.
    layout: AtomicU32,
    /// Whether the verification has been reported.
    is_reported: AtomicU32,
    misses: AtomicU32,
    python: PythonNodes,
}

impl AutogradRecorder {
    fn new() -> AutogradRecorder {
        AutogradRecorder {
            forward: SparseTable::new(FORWARD_SLOTS),
            unnumbered: SparseTable::new(UNNUMBERED_BUCKETS),
            contexts: SparseTable::new(CONTEXT_SLOTS),
            contexts_lock: Lock::new(),
            context_count: AtomicU32::new(0),
            layout: AtomicU32::new(0),
            is_reported: AtomicU32::new(0),
            misses: AtomicU32::new(0),
            python: PythonNodes::new(),
        }
    }

    /// Remembers where the node with this number was created. `owner` is PyTorch's number of the thread.
    fn remember(&self, owner: u64, number: u64, created: CreatedAt) {
        let (slot, check) = slot_and_check(owner, number);
        if let Some([word]) = self.forward.entries().get(slot) {
            word.store(check | created.pack(), Ordering::Relaxed);
        }
    }

    fn recall(&self, owner: u64, number: u64) -> Option<CreatedAt> {
        let (slot, check) = slot_and_check(owner, number);
        let [word] = self.forward.entries().get(slot)?;
        let word = word.load(Ordering::Relaxed);
        (word & CHECK_MASK == check && word != 0).then_some(CreatedAt::unpack(word))
    }

    /// Remembers where the node at this address was created, which has no number.
    fn remember_unnumbered(&self, address: u64, created: CreatedAt) {
        let (slot, check) = slot_and_check(address, NO_NUMBER);
        let Some(bucket) = self.unnumbered.entries().get(slot % UNNUMBERED_BUCKETS) else { return };
        let is_free = |word: &&AtomicU64| {
            let known = word.load(Ordering::Relaxed);
            known == 0 || known & CHECK_MASK == check
        };
        let any = bucket.get((check >> 60) as usize % BUCKET);
        if let Some(word) = bucket.iter().find(is_free).or(any) {
            word.store(check | created.pack(), Ordering::Relaxed);
        }
    }

    fn recall_unnumbered(&self, address: u64) -> Option<CreatedAt> {
        let (slot, check) = slot_and_check(address, NO_NUMBER);
        let bucket = self.unnumbered.entries().get(slot % UNNUMBERED_BUCKETS)?;
        let words = bucket.iter().map(|word| word.load(Ordering::Relaxed));
        words.take_while(|word| *word != 0).find(|word| word & CHECK_MASK == check).map(CreatedAt::unpack)
    }

    /// Not inlined, because it would take registers from the more frequent nodes with a number.
    #[inline(never)]
    fn forward_of_unnumbered(&self, address: u64) -> Forward {
        self.recall_unnumbered(address).map_or(Forward::NoNumber, Forward::Known)
    }

    /// The slots in which the context of such a node may be, [`WORDS`] words each. `kind` is the address of a vtable or
    /// a Python class.
    fn context_slots(&self, kind: u64, created: CreatedAt) -> impl Iterator<Item = &[AtomicU64; WORDS]> {
        let slots = self.contexts.entries();
        let spread = (kind ^ u64::from(created.stack.0) << 32)
            .wrapping_add(u64::from(created.module.0).wrapping_mul(0xd6e8_feb8_6659_fd93));
        let start = (spread.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
        (0..64).map_while(move |probe| slots.get((start + probe) % CONTEXT_SLOTS))
    }

    /// The context of such a node. `None` if there is none yet.
    #[inline]
    fn find_context(&self, kind: u64, created: CreatedAt) -> Option<ContextId> {
        for [key, value, module] in self.context_slots(kind, created) {
            let known = value.load(Ordering::Acquire);
            if known == 0 {
                return None;
            }
            if key.load(Ordering::Relaxed) == kind && is_created_at(known, module, created) {
                return Some(ContextId(known as u32));
            }
        }
        None
    }

    /// The context of a node that was first seen when there were too many contexts, so it has no module.
    #[cold]
    fn find_context_without_module(&self, kind: u64, created: CreatedAt) -> Option<ContextId> {
        self.omits_modules()
            .then(|| self.find_context(kind, CreatedAt { module: ContextId::NONE, ..created }))
            .flatten()
    }

    fn omits_modules(&self) -> bool {
        self.context_count.load(Ordering::Relaxed) >= MAX_CONTEXTS_WITH_MODULE
    }

    /// Whether autograd recording is switched off because no layout was verified.
    fn is_off(&self) -> bool {
        self.layout.load(Ordering::Relaxed) == 0 && self.misses.load(Ordering::Relaxed) >= MAX_MISSES
    }

    /// Reports once that the layout is verified: a node carried a number that its forward call was given.
    fn report_verified(&self, guard: &mut Guard) {
        if self.layout.load(Ordering::Relaxed) != 0 && self.is_reported.swap(1, Ordering::Relaxed) == 0 {
            guard.notice(
                "torch.autograd",
                NoticeStatus::Works,
                "Node verified: it has the sequence number of its forward call",
            );
            grad_mode::report(guard);
        }
    }

    /// Where a node was created.
    ///
    /// # Safety
    ///
    /// `node` points to a live autograd node.
    unsafe fn forward(&self, node: *const u64) -> Forward {
        let known = self.layout.load(Ordering::Relaxed) as usize;
        let layouts = LAYOUTS.iter().enumerate().filter(|(index, _)| known == 0 || known == index + 1);
        let mut outcome = Forward::Unknown;
        for (index, (number_at, owner_at)) in layouts {
            // SAFETY: the caller guarantees a live node. Every node has at least 56 bytes, and the greatest index is 6.
            let (number, owner) = unsafe { (node.add(*number_at).read(), node.add(*owner_at).read()) };
            if number == NO_NUMBER {
                // This does not verify the layout, because any field may have all bits set.
                return self.forward_of_unnumbered(node as u64);
            }
            if let Some(created) = self.recall(owner, number) {
                self.layout.store(index as u32 + 1, Ordering::Relaxed);
                outcome = Forward::Known(created);
            }
        }
        outcome
    }
}

/// The forward call of a node.
enum Forward {
    Known(CreatedAt),
    /// The node has no number, or was created before recording began.
    NoNumber,
    /// The number was never assigned, or its entry has been overwritten.
    Unknown,
}

/// Where a node was created: the Python stack and the module call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CreatedAt {
    stack: StackId,
    module: ContextId,
}

const STACK_BITS: u32 = 21;
const MODULE_BITS: u32 = 18;
const CHECK_MASK: u64 = !0 << (STACK_BITS + MODULE_BITS);
const _: () = assert!(MAX_STACKS >> STACK_BITS == 0 && (CONTEXT_SLOTS as u32 + MAX_CALLS) >> MODULE_BITS == 0);

impl CreatedAt {
    const UNKNOWN: CreatedAt = CreatedAt { stack: StackId::NONE, module: ContextId::NONE };

    fn pack(self) -> u64 {
        (u64::from(self.module.0) << STACK_BITS | u64::from(self.stack.0)) & !CHECK_MASK
    }

    fn unpack(word: u64) -> CreatedAt {
        let stack = word as u32 & ((1 << STACK_BITS) - 1);
        let module = (word >> STACK_BITS) as u32 & ((1 << MODULE_BITS) - 1);
        CreatedAt { stack: StackId(stack), module: ContextId(module) }
    }
}

/// Whether a context of the table has this stack and this module. `value` is its second word.
fn is_created_at(value: u64, module: &AtomicU64, created: CreatedAt) -> bool {
    (value >> 32) as u32 == created.stack.0 && module.load(Ordering::Relaxed) == u64::from(created.module.0)
}

/// The slot of a node's entry, and the upper bits of its word. Consecutive numbers get adjacent slots, so a thread
/// reuses a slot only after a million later nodes.
fn slot_and_check(owner: u64, number: u64) -> (usize, u64) {
    let spread = owner.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let slot = number.wrapping_add(spread >> 40) as usize % FORWARD_SLOTS;
    let mut hash = (number ^ spread).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (slot, (hash & CHECK_MASK) | 1 << 63)
}

const GET_AND_INCREMENT: &CStr = c"_ZN2at15sequence_number17get_and_incrementEv";
const CURRENT_THREAD: &CStr = c"_ZN2at14RecordFunction15currentThreadIdEv";
const EVALUATE: &CStr =
    c"_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferERKS2_INS0_10ReadyQueueEE";
const ACCUMULATE_GRAD: &CStr = c"_ZN5torch8autograd14AccumulateGradC1EN2at6TensorE";

/// `uint64_t at::sequence_number::get_and_increment()`.
#[cfg_attr(not(test), unsafe(export_name = "_ZN2at15sequence_number17get_and_incrementEv"))]
extern "C-unwind" fn get_and_increment() -> u64 {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libtorch_cpu(&ORIGINAL, GET_AND_INCREMENT);
    if original.is_null() {
        return 0;
    }
    // SAFETY: `original` is libtorch_cpu's function of this symbol, which has this signature.
    let number = unsafe {
        let original: unsafe extern "C-unwind" fn() -> u64 = std::mem::transmute(original);
        original()
    };
    if Process::if_started().is_some()
        && let Some(owner) = forward_thread()
        && let Some(mut guard) = Guard::enter()
        && let Some(state) = AUTOGRAD.get()
    {
        let (stack, module) = guard.stack_and_module_call();
        state.remember(owner, number, CreatedAt { stack, module });
    }
    number
}

/// PyTorch's own number of the calling thread, which its nodes carry. `None` if libtorch_cpu does not export the
/// function.
fn forward_thread() -> Option<u64> {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libtorch_cpu(&ORIGINAL, CURRENT_THREAD);
    if original.is_null() {
        return None;
    }
    // SAFETY: `static uint64_t at::RecordFunction::currentThreadId()` reads a thread-local counter. The constructor of
    // the node calls it too.
    unsafe {
        let original: unsafe extern "C-unwind" fn() -> u64 = std::mem::transmute(original);
        Some(original())
    }
}

/// `torch::autograd::AccumulateGrad::AccumulateGrad(at::Tensor)`. A class with a destructor is passed by address.
#[cfg_attr(not(test), unsafe(export_name = "_ZN5torch8autograd14AccumulateGradC1EN2at6TensorE"))]
extern "C-unwind" fn accumulate_grad(node: *mut c_void, tensor: *mut c_void) {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libtorch_cpu(&ORIGINAL, ACCUMULATE_GRAD);
    if original.is_null() {
        return;
    }
    // SAFETY: `original` is libtorch_cpu's function of this symbol, and the arguments are the caller's.
    unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) = std::mem::transmute(original);
        original(node, tensor);
    }
    if Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
        && let Some(state) = AUTOGRAD.get()
    {
        let (stack, module) = guard.stack_and_module_call();
        state.remember_unnumbered(node as u64, CreatedAt { stack, module });
    }
}

/// Restores the thread's state after a node, also if the node throws.
struct RestoreOnDrop {
    context: ContextId,
}

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        with_thread_local(|t| {
            t.context.set(self.context);
            t.backward_depth.set(t.backward_depth.get().saturating_sub(1));
            node_ends();
        });
    }
}

/// `void torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&, Node*, InputBuffer&, const
/// std::shared_ptr<ReadyQueue>&)`.
#[cfg_attr(
    not(test),
    unsafe(
        export_name = "_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferERKS2_INS0_10ReadyQueueEE"
    )
)]
extern "C-unwind" fn evaluate_function(
    engine: *mut c_void,
    graph_task: *mut c_void,
    node: *mut c_void,
    inputs: *mut c_void,
    ready_queue: *mut c_void,
) {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libtorch_cpu(&ORIGINAL, EVALUATE);
    if original.is_null() {
        return;
    }
    let context = context_of(node);
    let _restore = with_thread_local(|t| {
        node_starts();
        t.backward_depth.set(t.backward_depth.get() + 1);
        RestoreOnDrop { context: t.context.replace(context) }
    });
    // SAFETY: `original` is libtorch_cpu's function of this symbol, and the arguments are the caller's. A C++ exception
    // unwinds through this frame and runs the destructor of `RestoreOnDrop`.
    unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void) =
            std::mem::transmute(original);
        original(engine, graph_task, node, inputs, ready_queue);
    }
}

/// The names of the functions that this file replaces, and what replaces them.
pub(super) fn replacements() -> [(&'static CStr, *const ()); 3] {
    [
        (GET_AND_INCREMENT, get_and_increment as *const ()),
        (ACCUMULATE_GRAD, accumulate_grad as *const ()),
        (EVALUATE, evaluate_function as *const ()),
    ]
}

/// The context of a node. [`ContextId::NONE`] if it has none.
fn context_of(node: *mut c_void) -> ContextId {
    let Some(process) = Process::if_started() else { return ContextId::NONE };
    let Some(state) = AUTOGRAD.get() else { return ContextId::NONE };
    if node.is_null() || state.is_off() {
        return ContextId::NONE;
    }
    let node = node.cast::<u64>();
    // SAFETY: the engine is about to run this node, so it is alive. It begins with its vtable pointer.
    let (vtable, forward) = unsafe { (node.read(), state.forward(node)) };
    if matches!(forward, Forward::Unknown) {
        if state.layout.load(Ordering::Relaxed) != 0 {
            process.count(Counter::ForwardStacksLost, 1);
        } else if !attached::is_here()
            && state.misses.fetch_add(1, Ordering::Relaxed) + 1 == MAX_MISSES
            && let Some(mut guard) = Guard::enter()
        {
            guard.notice(
                "torch.autograd",
                NoticeStatus::Off,
                "Node layout not recognized: backward allocations have no node and no forward call",
            );
        }
    }
    let created = if let Forward::Known(created) = forward { created } else { CreatedAt::UNKNOWN };
    // SAFETY: the engine is about to run this node, so it is alive, and `vtable` is its first word.
    let kind = unsafe { state.python.class(node, vtable) }.unwrap_or(vtable);
    // No closure, because a call of one would keep what it captures in memory for every node.
    match state.find_context(kind, created).or_else(|| state.find_context_without_module(kind, created)) {
        Some(context) => context,
        // SAFETY: the engine is about to run this node, so it is alive, and `vtable` is its first word.
        None => unsafe { add_context(process, state, node, vtable, created) },
    }
}

/// Creates the context of a node whose combination of type, stack and module is new.
///
/// # Safety
///
/// `node` is a live node with this vtable.
#[cold]
unsafe fn add_context(
    process: &'static Process,
    state: &AutogradRecorder,
    node: *const u64,
    vtable: u64,
    created: CreatedAt,
) -> ContextId {
    let python = &state.python;
    // SAFETY: the caller guarantees a live node with this vtable.
    let class = || unsafe { python.class(node, vtable) };
    if let Some(class) = class() {
        return define_context(process, state, class, created, &python.name(class));
    }
    let name = type_name(vtable);
    python.class_seen(vtable, &name);
    match class() {
        Some(class) => define_context(process, state, class, created, &python.name(class)),
        None => define_context(process, state, vtable, created, &name),
    }
}

/// Creates a context, unless another thread has just created the same one. [`ContextId::NONE`] if there is no space.
fn define_context(
    process: &'static Process,
    state: &AutogradRecorder,
    kind: u64,
    created: CreatedAt,
    name: &str,
) -> ContextId {
    let created = if state.omits_modules() { CreatedAt { module: ContextId::NONE, ..created } } else { created };
    let Some(mut guard) = Guard::enter() else { return ContextId::NONE };
    state.report_verified(&mut guard);
    let Some(locked) = state.contexts_lock.lock() else {
        process.count(Counter::ForwardStacksLost, 1);
        return ContextId::NONE;
    };
    let mut outcome = None;
    for [key, value, module] in state.context_slots(kind, created) {
        let known = value.load(Ordering::Relaxed);
        if known == 0 {
            let id = process.next_context();
            state.context_count.fetch_add(1, Ordering::Relaxed);
            key.store(kind, Ordering::Relaxed);
            module.store(u64::from(created.module.0), Ordering::Relaxed);
            value.store(u64::from(created.stack.0) << 32 | u64::from(id.0), Ordering::Release);
            outcome = Some((id, true));
            break;
        }
        if key.load(Ordering::Relaxed) == kind && is_created_at(known, module, created) {
            outcome = Some((ContextId(known as u32), false));
            break;
        }
    }
    drop(locked);
    match outcome {
        Some((id, new)) => {
            if new {
                let CreatedAt { stack: forward, module } = created;
                guard.define(&Definition::Context { id, node: name, forward, module });
            }
            id
        }
        None => {
            process.count(Counter::StacksTruncated, 1);
            ContextId::NONE
        }
    }
}

/// A class's name without namespaces, from its vtable. The word before the first function points to the type info,
/// whose second word points to the mangled name (Itanium C++ ABI 2.9).
fn type_name(vtable: u64) -> String {
    // SAFETY: `vtable` belongs to a live node. PyTorch's libraries are compiled with type information.
    let mangled: CString = unsafe {
        let type_info = (vtable as *const *const *const std::ffi::c_char).sub(1).read();
        if type_info.is_null() {
            return String::from("Node");
        }
        CStr::from_ptr(type_info.add(1).read()).to_owned()
    };
    last_component(mangled.to_bytes())
}

/// The last component of a mangled name: `N5torch8autograd9generated12AddBackward0E` gives `AddBackward0`.
fn last_component(mangled: &[u8]) -> String {
    let mut rest = mangled.strip_prefix(b"N").unwrap_or(mangled);
    let mut last: &[u8] = mangled;
    loop {
        let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
        let (number, tail) = rest.split_at(digits);
        let len = number.iter().fold(0usize, |n, d| n.saturating_mul(10).saturating_add(usize::from(d - b'0')));
        if len == 0 || len > tail.len() {
            break;
        }
        let (component, after) = tail.split_at(len);
        last = component;
        rest = after;
    }
    String::from_utf8_lossy(last).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_component_of_a_mangled_name() {
        assert_eq!(last_component(b"N5torch8autograd9generated20ConvolutionBackward0E"), "ConvolutionBackward0");
        assert_eq!(last_component(b"N5torch8autograd14AccumulateGradE"), "AccumulateGrad");
        assert_eq!(last_component(b"5Plain"), "Plain");
        assert_eq!(last_component(b"odd"), "odd");
        assert_eq!(last_component(b"N5torch8autograd7CppNodeI4MineEE"), "CppNode");
    }

    #[test]
    fn forward_stacks_are_recalled_by_thread_and_number() {
        let state = AutogradRecorder::new();
        let created = |n: u64| CreatedAt { stack: StackId(n as u32 + 1), module: ContextId(n as u32 % 7) };
        for number in 0..1000 {
            state.remember(1, number, created(number));
            state.remember(2, number, created(number + 5000));
        }
        let correct = (0..1000).filter(|n| state.recall(1, *n) == Some(created(*n))).count();
        assert!(correct >= 999 || state.recall(2, 3) == Some(created(5003)), "{correct}");
        assert_eq!(state.recall(3, 5), None);
        let last = CreatedAt { stack: StackId(MAX_STACKS), module: ContextId(CONTEXT_SLOTS as u32 + MAX_CALLS) };
        state.remember(1, 7 + FORWARD_SLOTS as u64, last);
        assert_eq!(state.recall(1, 7 + FORWARD_SLOTS as u64), Some(last));
        assert_eq!(state.recall(1, 7), None);
    }

    #[test]
    fn nodes_without_a_number_do_not_replace_numbered_ones() {
        let state = AutogradRecorder::new();
        let created = |n: u64| CreatedAt { stack: StackId(n as u32 + 1), module: ContextId(n as u32 % 7) };
        for n in 0..20_000 {
            state.remember(1, n, created(n));
            state.remember_unnumbered(0x7f00_0000_1000 + 112 * n, created(n + 20_000));
        }
        // New nodes at the same addresses replace the old entries.
        for n in 0..5000 {
            state.remember_unnumbered(0x7f00_0000_1000 + 112 * n, created(n + 50_000));
        }
        assert!((0..20_000).all(|n| state.recall(1, n) == Some(created(n))));
        let found = |n: u64| state.recall_unnumbered(0x7f00_0000_1000 + 112 * n);
        assert!((0..20_000).all(|n| found(n) == Some(created(n + if n < 5000 { 50_000 } else { 20_000 }))));
        assert_eq!(state.recall_unnumbered(0x7f00_0000_1008), None);
        // With twenty times as many nodes as slots, most of the last ones are still there.
        let many = 20 * (UNNUMBERED_BUCKETS * BUCKET) as u64;
        (0..many).for_each(|n| state.remember_unnumbered(64 * n + 64, created(n % 1000)));
        let last = many - 10_000..many;
        let correct = last.clone().filter(|n| state.recall_unnumbered(64 * n + 64) == Some(created(n % 1000))).count();
        assert!(correct > 9_000, "{correct}");
    }
}
