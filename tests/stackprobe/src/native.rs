//! Native stacks behind the C interface of `backtrace(3)`: for measuring them beside other unwinders from one call site.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::OnceLock;

use memtrace_trace::ids::{FrameId, ModuleId, StackId};

use crate::stack::{DefinitionSink, FrameText, Interner, LoadedObject, Loss, NativeStacks};

static INTERNER: OnceLock<Interner> = OnceLock::new();

thread_local! {
    static STACKS: UnsafeCell<NativeStacks> = const { UnsafeCell::new(NativeStacks::new()) };
}

/// Takes definitions and forgets them.
struct Forget;

impl DefinitionSink for Forget {
    fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}

    fn stack(&mut self, id: StackId, _: StackId, _: FrameId) {
        std::hint::black_box(id);
    }
}

/// All that is defined while one stack is taken with an interner of its own.
#[derive(Default)]
struct Keep {
    starts: Vec<usize>,
    addresses: HashMap<FrameId, usize>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
    lost: bool,
}

impl DefinitionSink for Keep {
    fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}

    fn module(&mut self, object: &LoadedObject<'_>) -> ModuleId {
        self.starts.push(object.start);
        ModuleId(self.starts.len() as _)
    }

    fn native_frame(&mut self, id: FrameId, module: ModuleId, address: u64) {
        // An object linked at 0, as shared ones and position-independent executables are, starts at its load bias.
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

/// Takes the calling thread's native stack as a hook does; gives 0 where there is none, else something else. `into` is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn probe_native(_into: *mut usize, _size: i32) -> i32 {
    let interner = INTERNER.get_or_init(Interner::new);
    // SAFETY: the reference ends with this call, and a capture does not call back into the probe.
    let stack = STACKS.with(|stacks| unsafe { &mut *stacks.get() }.capture(interner, &mut Forget));
    i32::from(!stack.is_none())
}

/// Writes up to `size` return addresses of the calling thread's native stack, innermost first; gives their number, -1 where
/// something was lost. Takes the stack twice, from nothing and with what the first has left, and gives -2 where they differ.
///
/// # Safety
/// `into` has room for `size` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_native_addresses(into: *mut usize, size: i32) -> i32 {
    let (interner, mut stacks, mut keep) = (Interner::new(), NativeStacks::new(), Keep::default());
    // A frame inside this library is not shown, so both are the caller's.
    let found = [(); 2].map(|()| stacks.capture(&interner, &mut keep));
    stacks.release();
    let (mut id, mut count) = (found[0], 0);
    if keep.lost || id.is_none() {
        return -1;
    }
    if found[0] != found[1] {
        return -2;
    }
    while let (Some((parent, frame)), true) = (keep.stacks.get(&id), count < size) {
        // SAFETY: as promised by the caller.
        unsafe { into.add(count as usize).write(keep.addresses.get(frame).copied().unwrap_or(0)) };
        (id, count) = (*parent, count + 1);
    }
    count
}
