//! A hooked CUDA function.

use std::ffi::CStr;

use memtrace_trace::api::{Api, MemoryKind};

use crate::linker::original::OriginalFunction;

/// One hooked function.
pub(super) struct Hook {
    pub(super) api: Api,
    pub(super) symbol: &'static CStr,
    /// The stub.
    pub(super) entry: unsafe extern "C" fn(),
    /// The function of this name as the loader resolves it: the stub, or the function of a library that is preloaded
    /// before this one.
    pub(super) exported: unsafe extern "C" fn(),
    /// The original function. For the runtime, the one that `dlsym` returned first; `call::runtime_original` looks for
    /// others.
    pub(super) original: OriginalFunction,
    /// The next function of this name in the global scope, if an object that was loaded with `dlopen` exports one.
    pub(super) next: OriginalFunction,
}

impl Hook {
    /// The hook of a function. `symbol` is its name, followed by a NUL.
    pub(super) const fn new(
        api: Api,
        symbol: &'static str,
        entry: unsafe extern "C" fn(),
        exported: unsafe extern "C" fn(),
    ) -> Hook {
        let symbol = match CStr::from_bytes_with_nul(symbol.as_bytes()) {
            Ok(symbol) => symbol,
            Err(_) => c"",
        };
        Hook { api, symbol, entry, exported, original: OriginalFunction::new(), next: OriginalFunction::new() }
    }

    /// Whether the function belongs to the CUDA runtime (`cuda...`), not to the driver (`cu...`).
    #[inline]
    pub(super) fn is_runtime(&self) -> bool {
        Hook::is_of_runtime(self.api)
    }

    /// [`Self::is_runtime`] for the function with this number.
    #[inline]
    pub(super) const fn is_of_runtime(api: Api) -> bool {
        api.0 >= FIRST_RUNTIME
    }

    /// Whether the function concerns host memory.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.api.memory_kind(), Some(MemoryKind::Host | MemoryKind::Registered))
    }

    /// Whether the function concerns memory of a stream-ordered pool.
    pub(super) fn is_pool(&self) -> bool {
        self.api.memory_kind() == Some(MemoryKind::Pool)
    }

    /// The index among the runtime's functions.
    pub(super) fn runtime_index(&self) -> usize {
        usize::from(self.api.0.saturating_sub(FIRST_RUNTIME))
    }
}

/// The wire number of the first runtime function. All larger ones belong to the runtime too.
const FIRST_RUNTIME: u16 = Api::cudaMalloc.0;
/// Upper bound on the number of runtime functions.
pub(super) const MAX_RUNTIME_HOOKS: usize = 32;
