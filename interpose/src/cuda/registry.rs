//! All hooks, and their names for `cuGetProcAddress`, from the table of hooked functions.

use memtrace_trace::api::Api;
use memtrace_trace::hooked_functions;

use super::functions;
use super::hook::Hook;

/// A name of a driver function, as `cuGetProcAddress` takes it: without a suffix for its version.
struct EntryPoint {
    name: &'static str,
    /// The CUDA release that introduced this interface. `None` if the returned address says which interface it is.
    since: Option<i32>,
    hook: &'static Hook,
}

impl EntryPoint {
    /// Whether the function uses the default stream of the calling thread.
    fn is_per_thread(&self) -> bool {
        self.hook.symbol.to_bytes().ends_with(b"_ptsz")
    }
}

macro_rules! registry {
    (
        $($number:literal $symbol:ident $Source:ident $Memory:ident $Effect:ident $Action:ident
        $(as $name:ident $(since $version:literal)?)?;)*
    ) => {
        /// All hooks.
        pub(super) static HOOKS: [&Hook; Api::ALL.len()] = [$(&functions::$symbol::HOOK),*];

        /// The names that are not those of the symbols, oldest interfaces first.
        static ENTRY_POINTS: &[EntryPoint] = &[$($(EntryPoint {
            name: stringify!($name),
            since: registry!(@since $($version)?),
            hook: &functions::$symbol::HOOK,
        },)?)*];
    };
    (@since) => { None };
    (@since $version:literal) => { Some($version) };
}

hooked_functions!(registry);

/// The hook that exports this name.
pub(super) fn by_symbol(name: &[u8]) -> Option<&'static Hook> {
    HOOKS.iter().copied().find(|h| h.symbol.to_bytes() == name)
}

fn entry_points(name: &[u8]) -> impl DoubleEndedIterator<Item = &'static EntryPoint> {
    ENTRY_POINTS.iter().filter(move |entry| entry.name.as_bytes() == name)
}

/// The driver hook for a name and a version, as `cuGetProcAddress` takes them. `version` is the CUDA release whose
/// interface the caller requests.
pub(super) fn by_entry_point(name: &[u8], version: i32, per_thread_stream: bool) -> Option<&'static Hook> {
    entry_points(name)
        .filter(|entry| {
            entry.since.is_none_or(|since| since <= version) && (per_thread_stream || !entry.is_per_thread())
        })
        .max_by_key(|entry| (entry.is_per_thread(), entry.since))
        .map(|entry| entry.hook)
        .or_else(|| by_symbol(name).filter(|hook| !hook.is_runtime()))
}

/// The driver hooks that `cuGetProcAddress` may return for a name of which each interface has other arguments, newest
/// first. Only the returned address says which one it is. Empty for all other names.
pub(super) fn interfaces(name: &[u8]) -> impl Iterator<Item = &'static Hook> {
    let others = |entry: &&EntryPoint| entry.since.is_none() && !entry.is_per_thread();
    entry_points(name).rev().filter(others).map(|entry| entry.hook)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_are_found_by_base_name_and_version() {
        let symbol =
            |name: &str, version, ptds| by_entry_point(name.as_bytes(), version, ptds).and_then(|h| h.api.symbol());
        assert_eq!(symbol("cuMemAlloc", 12000, false), Some("cuMemAlloc_v2"));
        assert_eq!(symbol("cuMemAlloc", 2000, false), None);
        assert_eq!(symbol("cuMemAllocAsync", 12000, true), Some("cuMemAllocAsync_ptsz"));
        assert_eq!(symbol("cuMemCreate", 12000, true), Some("cuMemCreate"));
        assert_eq!(symbol("cudaMalloc", 12000, false), None);
        assert_eq!(symbol("cuStreamBeginCapture", 12000, true), Some("cuStreamBeginCapture_v2_ptsz"));
        assert_eq!(symbol("cuStreamBeginCapture", 10000, false), None);
        assert_eq!(symbol("cuStreamEndCapture", 10000, true), Some("cuStreamEndCapture_ptsz"));
        assert_eq!(symbol("cuGraphInstantiate", 11040, false), Some("cuGraphInstantiate_v2"));
        assert_eq!(symbol("cuGraphInstantiate", 12000, false), Some("cuGraphInstantiateWithFlags"));
        assert_eq!(symbol("cuGraphInstantiate", 10000, false), None);
        assert_eq!(symbol("cuMemAlloc_v2", 12000, false), Some("cuMemAlloc_v2"));
    }

    #[test]
    fn names_of_interfaces_with_other_arguments_have_all_their_hooks() {
        let symbols: Vec<_> = interfaces(b"cuCtxCreate").filter_map(|hook| hook.api.symbol()).collect();
        assert_eq!(symbols, ["cuCtxCreate_v4", "cuCtxCreate_v3", "cuCtxCreate_v2", "cuCtxCreate"]);
        assert!(interfaces(b"cuMemAlloc").next().is_none() && interfaces(b"cuMemAllocAsync").next().is_none());
    }
}
