//! The list of hooked CUDA functions. A new hook needs one line here and a body in [`super::functions`].

use memtrace_trace::api::Api;

use super::functions;
use super::hook::Hook;

macro_rules! registry {
    ($($name:ident)*) => {
        /// All hooks.
        pub(super) static HOOKS: [&Hook; Api::ALL.len()] = [$(&functions::$name::HOOK),*];
    };
}

registry! {
    cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged
    cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
    cuMemFreeAsync cuMemFreeAsync_ptsz cuMemFree_v2
    cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemAddressReserve cuMemAddressFree
    cuMemHostAlloc cuMemAllocHost_v2 cuMemHostRegister_v2 cuMemHostUnregister cuMemFreeHost
    cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy cuMipmappedArrayCreate cuMipmappedArrayDestroy
    cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuMemImportFromShareableHandle cuMemRetainAllocationHandle cuMemPoolTrimTo
    cuIpcGetMemHandle cuDevicePrimaryCtxRetain cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuLibraryLoadData cuLibraryLoadFromFile
    cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz
    cuStreamEndCapture cuStreamEndCapture_ptsz
    cuGraphInstantiate_v2 cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz
    cuGraphUpload cuGraphUpload_ptsz cuGraphExecDestroy
    cudaMalloc cudaMallocPitch cudaMalloc3D cudaMallocManaged
    cudaMallocAsync cudaMallocAsync_ptsz cudaMallocFromPoolAsync cudaMallocFromPoolAsync_ptsz
    cudaFreeAsync cudaFreeAsync_ptsz cudaFree
    cudaMallocHost cudaHostAlloc cudaHostRegister cudaHostUnregister cudaFreeHost
    cudaMallocArray cudaMalloc3DArray cudaFreeArray cudaMallocMipmappedArray cudaFreeMipmappedArray
    cudaIpcOpenMemHandle cudaIpcCloseMemHandle cudaIpcGetMemHandle
}

/// The hook that exports this name.
pub(super) fn by_symbol(name: &[u8]) -> Option<&'static Hook> {
    HOOKS.iter().copied().find(|h| h.symbol.to_bytes() == name)
}

/// The driver hook for a name and a version, as `cuGetProcAddress` takes them.
///
/// These names have no version suffix. `version` is the CUDA release whose interface the caller requests. The numbers
/// here are the releases that introduced each `_v2` interface (cuda.h).
pub(super) fn by_entry_point(name: &[u8], version: i32, per_thread_stream: bool) -> Option<&'static Hook> {
    let since = |v2: i32, suffix: &'static str| if version >= v2 { Some(suffix) } else { None };
    let suffix = match name {
        b"cuMemAlloc" | b"cuMemAllocPitch" | b"cuMemFree" | b"cuMemAllocHost" | b"cuArrayCreate"
        | b"cuArray3DCreate" => since(3020, "_v2")?,
        b"cuMemHostRegister" => since(6050, "_v2")?,
        b"cuIpcOpenMemHandle" => since(11000, "_v2")?,
        b"cuStreamBeginCapture" => since(10010, if per_thread_stream { "_v2_ptsz" } else { "_v2" })?,
        // From CUDA 12 on, the header gives this name to another function.
        b"cuGraphInstantiate" if version >= 12000 => "WithFlags",
        b"cuGraphInstantiate" => since(11000, "_v2")?,
        b"cuStreamBeginCaptureToGraph" | b"cuStreamEndCapture" | b"cuGraphInstantiateWithParams" | b"cuGraphUpload"
            if per_thread_stream =>
        {
            "_ptsz"
        }
        b"cuMemAllocAsync" | b"cuMemAllocFromPoolAsync" | b"cuMemFreeAsync" if per_thread_stream => "_ptsz",
        _ => "",
    };
    HOOKS.iter().copied().find(|h| {
        !h.is_runtime() && h.symbol.to_bytes().strip_suffix(suffix.as_bytes()).is_some_and(|base| base == name)
    })
}

/// The driver hooks that `cuGetProcAddress` may return for a name of which each interface has other arguments. Only the
/// returned address says which one it is. Empty for all other names.
pub(super) fn interfaces(name: &[u8]) -> &'static [&'static Hook] {
    static CREATE_CONTEXT: [&Hook; 4] = [
        &functions::cuCtxCreate_v4::HOOK,
        &functions::cuCtxCreate_v3::HOOK,
        &functions::cuCtxCreate_v2::HOOK,
        &functions::cuCtxCreate::HOOK,
    ];
    if name == b"cuCtxCreate" { &CREATE_CONTEXT } else { &[] }
}

#[cfg(test)]
mod tests {
    use super::super::hook::MAX_RUNTIME_HOOKS;
    use super::*;

    #[test]
    fn the_registry_and_the_trace_crate_list_the_same_functions() {
        let mut hooked: Vec<_> = HOOKS.iter().map(|h| h.api).collect();
        hooked.sort();
        assert_eq!(hooked, Api::ALL);
        for hook in &HOOKS {
            assert_eq!(hook.symbol.to_str().ok(), hook.api.symbol());
            assert!(!hook.is_runtime() || hook.runtime_index() < MAX_RUNTIME_HOOKS);
        }
    }

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
        let base = |hook: &&Hook| hook.symbol.to_bytes().starts_with(b"cuCtxCreate");
        assert_eq!(interfaces(b"cuCtxCreate").len(), HOOKS.iter().copied().filter(base).count());
        assert!(interfaces(b"cuMemAlloc").is_empty());
    }
}
