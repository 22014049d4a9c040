//! The CPython of this process: detected, verified, then walked.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use memtrace_trace::ids::{ContextId, StackId};

use super::super::definition::{DefinitionSink, Loss};
use super::super::intern::Interner;
use super::super::native::evaluator::Evaluator;
use super::super::thread::ThreadStacks;
use super::freed_code;
use super::layout::{Layout, Version};
use super::locals::FrameLocals;
use super::memory::CheckedMemory;
use super::reason::Reason;
use super::verify::{self, AddressToLine, Examined, LiveCheck, Types};
use super::walk::FrameWalker;

/// `PyGILState_GetThisThreadState`.
type ThisThreadState = unsafe extern "C" fn() -> *mut c_void;
/// `Py_GetVersion`.
type GetVersion = unsafe extern "C" fn() -> *const c_char;

/// No Python frame has been seen yet.
const UNVERIFIED: u8 = 0;
/// A thread is examining its frames.
const VERIFYING: u8 = 0xfe;
/// Stacks are captured. Any other number is a [`Reason`].
const VERIFIED: u8 = 0xff;

/// A thread state may have been created on another thread than it runs on. Then it does not hold this thread's id and
/// proves nothing, so this many attempts are made.
const MAX_ATTEMPTS: u32 = 100;

/// The CPython of this process. Made by [`Python::detect`], it lives as long as the process. A forked child makes its
/// own.
pub struct Python {
    this_thread_state: ThisThreadState,
    address_to_line: AddressToLine,
    types: Types,
    frames: FrameWalker,
    /// The address of `_PyEval_EvalFrameDefault`, 0 if it is not exported.
    evaluation: usize,
    /// Where that function's code is, once requested.
    /// Null before the first use.
    evaluator: AtomicPtr<Evaluator>,
    state: AtomicU8,
    attempts: AtomicU32,
}

impl Python {
    /// Detects CPython and checks everything that does not need a frame. `resolve` returns the address of a symbol or
    /// null.
    ///
    /// The interpreter need not be initialized. The result `NoPython` may change when a library is loaded.
    pub fn detect(mut resolve: impl FnMut(&CStr) -> *mut c_void) -> Result<Python, Reason> {
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
        // SAFETY: a symbol of this name is a function of this type in every CPython. It returns a static string.
        let version = unsafe { std::mem::transmute::<*mut c_void, GetVersion>(version)() };
        if version.is_null() {
            return Err(Reason::UnreadableVersion);
        }
        // SAFETY: `version` is not null and a static C string.
        let version = unsafe { CStr::from_ptr(version) }.to_str().map_err(|_| Reason::UnreadableVersion)?;
        let layout = verify::check_exports(Layout::of(Version::parse(version)?)?, &types, runtime)?;
        Ok(Python {
            // SAFETY: a symbol of this name is a function of this type in every CPython.
            this_thread_state: unsafe { std::mem::transmute::<*mut c_void, ThisThreadState>(this_thread_state) },
            // SAFETY: a symbol of this name is a function of this type in every CPython.
            address_to_line: unsafe { std::mem::transmute::<*mut c_void, AddressToLine>(address_to_line) },
            frames: FrameWalker::new(layout, types.code),
            types,
            evaluation,
            evaluator: AtomicPtr::new(std::ptr::null_mut()),
            state: AtomicU8::new(UNVERIFIED),
            attempts: AtomicU32::new(0),
        })
    }

    /// The calling thread's Python stack. `NONE` if it runs no Python code or stacks are switched off.
    ///
    /// Call it on the thread that is inside the hook, with or without the GIL, and never twice at a time on one thread.
    #[inline]
    pub fn capture<S: DefinitionSink>(&self, thread: &mut ThreadStacks, interner: &Interner, sink: &mut S) -> StackId {
        if self.state.load(Acquire) != VERIFIED && !self.verify(sink) {
            return StackId::NONE;
        }
        // SAFETY: the function reads a thread-specific value. It works before, during and after the interpreter's life.
        let state = unsafe { (self.this_thread_state)() };
        if state.is_null() {
            return StackId::NONE;
        }
        // SAFETY: the thread state of the calling thread is alive, and its layout is verified.
        let leaf = unsafe { self.frames.leaf(state.expose_provenance()) };
        // SAFETY: `leaf` was just read from the calling thread's state, which cannot change before this function
        // returns.
        unsafe {
            match self.frames.free_threaded_frames() {
                None => thread.capture(&self.frames.frames(), leaf, interner, sink),
                Some(frames) => thread.capture(&frames, leaf, interner, sink),
            }
        }
    }

    /// The innermost `nn.Module` being called on the stack of the last [`Self::capture`]. `NONE` if there is none.
    ///
    /// Call it right after that capture, on the same thread, and not if the capture returned no stack.
    #[inline]
    pub fn module_call<S: DefinitionSink>(&self, thread: &mut ThreadStacks, sink: &mut S) -> ContextId {
        // SAFETY: the thread is still inside the hook, so the chain of the last capture is unchanged.
        unsafe { thread.module_call(&self.frames.frames(), sink) }
    }

    /// Whether the calling thread is in a Python function of this name. `false` if frames cannot be read. It creates no
    /// frame objects.
    pub fn is_in_function(&self, name: &str) -> bool {
        if self.state.load(Acquire) != VERIFIED {
            return false;
        }
        // SAFETY: the function reads a thread-specific value. It works before, during and after the interpreter's life.
        let state = unsafe { (self.this_thread_state)() };
        // SAFETY: the thread state is alive and its layout verified. The calling thread's chain cannot change before
        // this function returns.
        !state.is_null() && unsafe { self.frames.is_in_function(self.frames.leaf(state.expose_provenance()), name) }
    }

    /// Access to the local variables of frames. `None` if frames cannot be read.
    pub fn frame_locals(&self) -> Option<FrameLocals<'_>> {
        (self.state.load(Acquire) == VERIFIED).then(|| FrameLocals::new(self.frames.layout(), self.types.code))
    }

    /// The address range of the interpreter's evaluation function.
    pub(crate) fn evaluator(&self) -> &Evaluator {
        // Two threads may both search. No thread waits for another.
        if self.evaluator.load(Acquire).is_null() {
            let found = Box::into_raw(Box::new(Evaluator::find(self.evaluation)));
            if self.evaluator.compare_exchange(std::ptr::null_mut(), found, AcqRel, Acquire).is_err() {
                // SAFETY: this box was just made, and no other thread has seen its address.
                drop(unsafe { Box::from_raw(found) });
            }
        }
        // SAFETY: the pointer is not null any more and comes from a box that is never freed.
        unsafe { &*self.evaluator.load(Acquire) }
    }

    /// Whether the evaluation function was called for this frame.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the calling thread's present chain, and the layout is verified.
    #[inline]
    pub(crate) unsafe fn begins_evaluation(&self, frame: usize) -> bool {
        // SAFETY: the caller guarantees the frame and the verified layout.
        unsafe { self.frames.begins_evaluation(frame) }
    }

    /// Whether stacks are captured. `Ok(false)` if no Python frame was seen yet, `Err` with the reason if they never
    /// are.
    pub fn verified(&self) -> Result<bool, Reason> {
        match self.state.load(Acquire) {
            VERIFIED => Ok(true),
            UNVERIFIED | VERIFYING => Ok(false),
            number => Err(Reason::from_wire(number.into()).unwrap_or(Reason::FrameChain)),
        }
    }

    /// Whether this is a free-threaded build, in which stacks are captured and other objects are not read.
    pub fn is_free_threaded(&self) -> bool {
        self.frames.layout().thread_bytecode.is_some()
    }

    /// The detected version, for example `(3, 12)`.
    pub fn version(&self) -> (u32, u32) {
        let version = self.frames.layout().version;
        (version.major, version.minor)
    }

    /// Verifies the layout unless a thread has done so. Returns whether stacks can be captured now.
    #[cold]
    fn verify(&self, sink: &mut dyn DefinitionSink) -> bool {
        // SAFETY: the function reads a thread-specific value. It works before, during and after the interpreter's life.
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
            Ok(Examined::Frames) => VERIFIED,
            Ok(Examined::NoFrames) => UNVERIFIED,
            Err(Reason::ThreadState) if self.attempts.fetch_add(1, Relaxed) < MAX_ATTEMPTS => {
                sink.lost(Loss::Unverified);
                UNVERIFIED
            }
            Err(reason) => reason as u8,
        };
        self.state.store(state, Release);
        state == VERIFIED
    }

    fn check_frames(&self, thread: usize) -> Result<Examined, Reason> {
        let check = LiveCheck {
            layout: self.frames.layout(),
            types: &self.types,
            address_to_line: self.address_to_line,
            memory: CheckedMemory::open()?,
        };
        // SAFETY: `pthread_self` takes no arguments and cannot fail.
        let thread_id = unsafe { libc::pthread_self() };
        let examined = check.run(thread, thread_id as usize)?;
        if examined == Examined::Frames {
            // SAFETY: `PyCode_Type` is the exported type object, and the layout's sizes and objects were verified.
            unsafe { freed_code::watch(self.types.code + self.frames.layout().objects.dealloc())? };
        }
        Ok(examined)
    }
}
