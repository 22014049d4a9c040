//! A hooked CUDA function.

use std::ffi::CStr;

use memtrace_trace::api::{Api, MemoryKind};
use memtrace_trace::event::Source;

use crate::linker::original::OriginalFunction;

/// One hooked function.
pub(super) struct Hook {
    pub(super) api: Api,
    /// The index among the runtime's functions. `usize::MAX` for a function of the driver.
    runtime_index: usize,
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
        let runtime_index = if Hook::is_of_runtime(api) { runtime_functions_before(api) } else { usize::MAX };
        Hook {
            api,
            runtime_index,
            symbol,
            entry,
            exported,
            original: OriginalFunction::new(),
            next: OriginalFunction::new(),
        }
    }

    /// Whether the function belongs to the CUDA runtime (`cuda...`), not to the driver (`cu...`).
    #[inline]
    pub(super) fn is_runtime(&self) -> bool {
        self.runtime_index != usize::MAX
    }

    /// [`Self::is_runtime`] for the function with this number.
    #[inline]
    pub(super) const fn is_of_runtime(api: Api) -> bool {
        matches!(api.source(), Some(Source::Runtime))
    }

    /// Whether the function concerns host memory.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.api.memory_kind(), Some(MemoryKind::Host | MemoryKind::Registered))
    }

    /// Whether the function concerns memory of a stream-ordered pool.
    pub(super) fn is_pool(&self) -> bool {
        self.api.memory_kind() == Some(MemoryKind::Pool)
    }

    /// The index among the runtime's functions. At least [`RUNTIME_HOOKS`] for a function of the driver.
    pub(super) fn runtime_index(&self) -> usize {
        self.runtime_index
    }
}

/// The number of runtime functions with a lower wire number.
const fn runtime_functions_before(api: Api) -> usize {
    let (mut count, mut rest): (usize, &[Api]) = (0, Api::ALL);
    while let [first, others @ ..] = rest
        && first.0 < api.0
    {
        count += Hook::is_of_runtime(*first) as usize;
        rest = others;
    }
    count
}

/// The number of runtime functions.
pub(super) const RUNTIME_HOOKS: usize = runtime_functions_before(Api(u16::MAX));
