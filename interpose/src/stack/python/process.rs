//! One CPython in one process: found, verified, then walked.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicU8, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use memtrace_trace::ids::{ContextId, StackId};

use super::super::definition::{DefinitionSink, Loss};
use super::super::intern::Interner;
use super::super::native::Evaluator;
use super::super::thread::ThreadStacks;
use super::deaths;
use super::layout::{Layout, TP_DEALLOC, Version};
use super::memory::CheckedMemory;
use super::reason::Reason;
use super::verify::{self, AddressToLine, LiveCheck, Seen, Types};
use super::walk::Frames;

/// `PyGILState_GetThisThreadState`.
type ThisThreadState = unsafe extern "C" fn() -> *mut c_void;
/// `Py_GetVersion`.
type GetVersion = unsafe extern "C" fn() -> *const c_char;

/// Nobody has seen a Python frame yet.
const UNVERIFIED: u8 = 0;
/// A thread is looking at its frames.
const VERIFYING: u8 = 0xfe;
/// Stacks are taken. Any other number is a [`Reason`].
const VERIFIED: u8 = 0xff;

/// A thread state may have been made on another thread than it runs on, and then does not hold this thread's id. Such a
/// thread proves nothing, so others are tried, but not for ever.
const MAX_ATTEMPTS: u32 = 100;

/// The CPython of this process. Made by [`Python::detect`]; lives as long as the process. A forked child makes its own.
pub(crate) struct Python {
    this_thread_state: ThisThreadState,
    address_to_line: AddressToLine,
    types: Types,
    frames: Frames,
    /// Address of `_PyEval_EvalFrameDefault`, 0 when it is not exported, and where its code is, once asked for.
    evaluation: usize,
    evaluator: OnceLock<Evaluator>,
    state: AtomicU8,
    attempts: AtomicU32,
}

impl Python {
    /// Looks for CPython and checks all that can be checked before any frame is seen. `resolve` gives the address of a
    /// symbol or null; nothing else is asked of it.
    ///
    /// Does not need an initialised interpreter. The answer `NoPython` may change when a library is loaded.
    pub(crate) fn detect(mut resolve: impl FnMut(&CStr) -> *mut c_void) -> Result<Python, Reason> {
        let version = resolve(c"Py_GetVersion");
        if version.is_null() {
            return Err(Reason::NoPython);
        }
        let mut symbol = |name: &CStr| {
            let address = resolve(name);
            if address.is_null() { Err(Reason::MissingSymbol) } else { Ok(address) }
        };
        let this_thread_state = symbol(c"PyGILState_GetThisThreadState")?;
        let address_to_line = symbol(c"PyCode_Addr2Line")?;
        let types = Types {
            code: symbol(c"PyCode_Type")?.expose_provenance(),
            frame: symbol(c"PyFrame_Type")?.expose_provenance(),
            unicode: symbol(c"PyUnicode_Type")?.expose_provenance(),
            bytes: symbol(c"PyBytes_Type")?.expose_provenance(),
        };
        let runtime = resolve(c"_PyRuntime").expose_provenance();
        let evaluation = resolve(c"_PyEval_EvalFrameDefault").expose_provenance();
        // SAFETY: a symbol of this name is a function of this type in every CPython; it returns a static string.
        let version = unsafe { std::mem::transmute::<*mut c_void, GetVersion>(version)() };
        if version.is_null() {
            return Err(Reason::UnreadableVersion);
        }
        // SAFETY: a static C string.
        let version = unsafe { CStr::from_ptr(version) }.to_str().map_err(|_| Reason::UnreadableVersion)?;
        let layout = verify::check_exports(Layout::of(Version::parse(version)?)?, &types, runtime)?;
        Ok(Python {
            // SAFETY: a symbol of this name is a function of this type in every CPython.
            this_thread_state: unsafe { std::mem::transmute::<*mut c_void, ThisThreadState>(this_thread_state) },
            // SAFETY: as above.
            address_to_line: unsafe { std::mem::transmute::<*mut c_void, AddressToLine>(address_to_line) },
            frames: Frames::new(layout, types.code),
            types,
            evaluation,
            evaluator: OnceLock::new(),
            state: AtomicU8::new(UNVERIFIED),
            attempts: AtomicU32::new(0),
        })
    }

    /// The calling thread's Python stack. `NONE` when it runs no Python code or stacks are switched off.
    ///
    /// To be called on the thread that is inside the hook, with or without the GIL, never twice at a time on one
    /// thread.
    #[inline]
    pub(crate) fn capture<S: DefinitionSink>(
        &self,
        thread: &mut ThreadStacks,
        interner: &Interner,
        sink: &mut S,
    ) -> StackId {
        if self.state.load(Acquire) != VERIFIED && !self.verify(sink) {
            return StackId::NONE;
        }
        // SAFETY: reads a thread-specific value; works before, during and after the interpreter's life.
        let state = unsafe { (self.this_thread_state)() };
        if state.is_null() {
            return StackId::NONE;
        }
        // SAFETY: the thread state of the calling thread is alive, and its layout is verified.
        let leaf = unsafe { self.frames.leaf(state.expose_provenance()) };
        // SAFETY: `leaf` was read from the calling thread's state just now, and cannot change before we return.
        unsafe { thread.capture(&self.frames, leaf, interner, sink) }
    }

    /// The innermost `nn.Module` being called on the stack that the last [`Self::capture`] gave; `NONE` when there is none.
    ///
    /// To be called right after it, on the same thread, and not when it gave no stack.
    #[inline]
    pub(crate) fn call<S: DefinitionSink>(&self, thread: &mut ThreadStacks, sink: &mut S) -> ContextId {
        // SAFETY: the thread is still inside the hook.
        unsafe { thread.call(&self.frames, sink) }
    }

    /// Whether the calling thread is in a function of this name, `false` also where frames cannot be read. Nothing is made an object.
    pub(crate) fn is_within(&self, name: &str) -> bool {
        if self.state.load(Acquire) != VERIFIED {
            return false;
        }
        // SAFETY: as in `capture`.
        let state = unsafe { (self.this_thread_state)() };
        // SAFETY: as in `capture`: the chain cannot change before we return.
        !state.is_null() && unsafe { self.frames.is_within(self.frames.leaf(state.expose_provenance()), name) }
    }

    /// Where the code of the interpreter's evaluation function is.
    pub(crate) fn evaluator(&self) -> &Evaluator {
        self.evaluator.get_or_init(|| Evaluator::find(self.evaluation))
    }

    /// Whether the evaluation function was called for this frame.
    ///
    /// # Safety
    /// `frame` belongs to the calling thread's present chain, and stacks are taken.
    #[inline]
    pub(crate) unsafe fn begins_evaluation(&self, frame: usize) -> bool {
        // SAFETY: as promised by the caller.
        unsafe { self.frames.begins_evaluation(frame) }
    }

    /// Whether stacks are taken: yes, not yet known (no Python frame was seen), or no, and why.
    pub(crate) fn verified(&self) -> Result<bool, Reason> {
        match self.state.load(Acquire) {
            VERIFIED => Ok(true),
            UNVERIFIED | VERIFYING => Ok(false),
            number => Err(Reason::from_number(number).unwrap_or(Reason::FrameChain)),
        }
    }

    /// The version that was found, e.g. `(3, 12)`.
    pub(crate) fn version(&self) -> (u32, u32) {
        let version = self.frames.layout().version;
        (version.major, version.minor)
    }

    /// Verifies if nobody has. True when stacks may be taken now.
    #[cold]
    fn verify(&self, sink: &mut dyn DefinitionSink) -> bool {
        // SAFETY: as in `capture`.
        let thread = unsafe { (self.this_thread_state)() };
        if thread.is_null() {
            return false;
        }
        match self.state.compare_exchange(UNVERIFIED, VERIFYING, Acquire, Acquire) {
            Ok(_) => {}
            Err(VERIFIED) => return true,
            Err(VERIFYING) => {
                sink.lost(Loss::Unverified);
                return false;
            }
            Err(_) => return false,
        }
        let state = match self.check_frames(thread.expose_provenance()) {
            Ok(Seen::Frames) => VERIFIED,
            Ok(Seen::Nothing) => UNVERIFIED,
            Err(Reason::ThreadState) if self.attempts.fetch_add(1, Relaxed) < MAX_ATTEMPTS => {
                sink.lost(Loss::Unverified);
                UNVERIFIED
            }
            Err(reason) => reason as u8,
        };
        self.state.store(state, Release);
        state == VERIFIED
    }

    fn check_frames(&self, thread: usize) -> Result<Seen, Reason> {
        let check = LiveCheck {
            layout: self.frames.layout(),
            types: &self.types,
            address_to_line: self.address_to_line,
            memory: CheckedMemory::open()?,
        };
        // SAFETY: takes nothing.
        let thread_id = unsafe { libc::pthread_self() };
        let seen = check.run(thread, thread_id as usize)?;
        if seen == Seen::Frames {
            // SAFETY: `PyCode_Type` is the exported type object of a layout whose sizes and objects were checked.
            unsafe { deaths::watch(self.types.code + TP_DEALLOC)? };
        }
        Ok(seen)
    }
}
