//! Native stacks behind the C interface of `backtrace(3)`, to measure them beside other unwinders from one call site.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::OnceLock;

use memtrace_trace::ids::{FrameId, ModuleId, StackId};

use memtrace_stackwalk::{DefinitionSink, FrameText, Interner, LoadedObject, Loss, NativeStacks};

static INTERNER: OnceLock<Interner> = OnceLock::new();

thread_local! {
    static STACKS: UnsafeCell<NativeStacks> = const { UnsafeCell::new(NativeStacks::new()) };
}

/// A sink that discards all definitions.
struct Discard;

impl DefinitionSink for Discard {
    fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}

    fn stack(&mut self, id: StackId, _: StackId, _: FrameId) {
        std::hint::black_box(id);
    }
}

/// A sink that keeps all definitions of one capture, which uses its own interner.
#[derive(Default)]
struct Collect {
    starts: Vec<usize>,
    addresses: HashMap<FrameId, usize>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
    lost: bool,
}

impl DefinitionSink for Collect {
    fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}

    fn module(&mut self, object: &LoadedObject<'_>) -> ModuleId {
        self.starts.push(object.start);
        ModuleId(self.starts.len() as _)
    }

    fn native_frame(&mut self, id: FrameId, module: ModuleId, address: u64) {
        // An object linked at address 0 starts at its load bias. Shared objects and position-independent executables
        // are.
        let start = (module.0 as usize).checked_sub(1).map_or(0, |index| self.starts[index]);
        self.addresses.insert(id, start + address as usize);
    }

    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId) {
        self.stacks.insert(id, (parent, frame));
    }

    fn lost(&mut self, _: Loss) {
        self.lost = true;
    }
}

/// Captures the calling thread's native stack as a hook does. Returns 1 for a stack and 0 for none. Writes nothing to
/// `_into`.
#[unsafe(no_mangle)]
pub extern "C" fn probe_native(_into: *mut usize, _size: i32) -> i32 {
    let interner = INTERNER.get_or_init(Interner::new);
    // SAFETY: `STACKS` is thread-local, and a capture does not call back into the probe. So this reference is the only
    // one.
    let stack = STACKS.with(|stacks| unsafe { &mut *stacks.get() }.capture(interner, &mut Discard));
    i32::from(!stack.is_none())
}

/// Writes up to `size` return addresses of the calling thread's native stack to `into`, innermost first.
///
/// Returns their number, or -1 where something was lost. Captures the stack twice, first without a cache and then with
/// the first capture's cache, and returns -2 where the two differ.
///
/// # Safety
/// The caller guarantees that `into` is valid for writing `size` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_native_addresses(into: *mut usize, size: i32) -> i32 {
    let (interner, mut stacks, mut definitions) = (Interner::new(), NativeStacks::new(), Collect::default());
    // Frames inside this library are not shown, so both captures start at the caller's frame.
    let found = [(); 2].map(|()| stacks.capture(&interner, &mut definitions));
    stacks.release();
    let (mut id, mut count) = (found[0], 0);
    if definitions.lost || id.is_none() {
        return -1;
    }
    if found[0] != found[1] {
        return -2;
    }
    while let (Some((parent, frame)), true) = (definitions.stacks.get(&id), count < size) {
        // SAFETY: `count < size`, and the caller guarantees that `into` is valid for writing `size` addresses.
        unsafe { into.add(count as usize).write(definitions.addresses.get(frame).copied().unwrap_or(0)) };
        (id, count) = (*parent, count + 1);
    }
    count
}
