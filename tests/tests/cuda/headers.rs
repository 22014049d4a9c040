//! The hooks are compared with NVIDIA's headers of two versions: each hooked function has the parameters that cuda.h or
//! cuda_runtime_api.h declares, and each function there that can give or take memory is hooked or has its reason here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use memtrace_tests::traced_program::{packages, root};
use memtrace_trace::api::Api;

/// The Python packages with the headers, and the folder of each.
const HEADERS: [(&str, &str); 2] = [
    ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia/cuda_runtime/include"),
    ("nvidia-cuda-runtime==13.5.37", "nvidia/cu13/include"),
];

/// Functions whose names or parameters look as if they gave or took memory, and why they are not hooked. A trailing `*`
/// stands for any end of the name.
const NOT_HOOKED: &[(&str, &[&str])] = &[
    (
        "the interfaces of CUDA 3 and 10 under these names, which newer headers declare for the driver itself only",
        &[
            "cuMemAlloc",
            "cuMemAllocPitch",
            "cuMemAllocHost",
            "cuMemFree",
            "cuArrayCreate",
            "cuArray3DCreate",
            "cuIpcOpenMemHandle",
            "cuGraphInstantiate",
        ],
    ),
    (
        "they return the address or the handle of memory that exists already",
        &[
            "cu*GetMemPool",
            "cu*GetDefaultMemPool",
            "cuMemGetAddressRange_v2",
            "cuModuleGetGlobal_v2",
            "cuTexRefGetAddress_v2",
            "cuCtxPopCurrent*",
            "cuCtxGetCurrent",
            "cuLibraryGetModule",
            "cuKernelGetLibrary",
            "cu*LibraryGetGlobal",
            "cu*LibraryGetManaged",
            "cu*LibraryGetUnifiedFunction",
            "cu*ArrayGetPlane",
            "cuMipmappedArrayGetLevel",
            "cudaGetMipmappedArrayLevel",
            "cuStreamGetCtx*",
            "cuFuncGetModule",
            "cu*GraphMemAllocNodeGetParams",
            "cu*GraphMemFreeNodeGetParams",
            "cuTexRefGet*Array",
            "cuSurfRefGetArray",
            "cuCtxFromGreenCtx",
            "cudaGetSymbolAddress",
            "cu*HostGetDevicePointer*",
            "cuCtxAttach",
        ],
    ),
    (
        "memory of Vulkan, OpenGL or another process, which that one owns",
        &[
            "cu*ImportExternalMemory",
            "cu*ExternalMemoryGetMapped*",
            "cu*DestroyExternalMemory",
            "cu*Graphics*",
            "cu*MemPoolImportPointer",
            "cu*MemPoolImportFromShareableHandle",
        ],
    ),
    (
        "a pool or a multicast object has no memory until an allocation or a mapping, which is hooked",
        &["cu*MemPoolCreate", "cu*MemPoolDestroy", "cuMulticastCreate"],
    ),
    (
        "the driver's own memory, whose size no call tells: the device's usage is sampled",
        &[
            "cuDevicePrimaryCtxRelease*",
            "cuCtxDestroy*",
            "cuModuleUnload",
            "cu*LibraryUnload",
            "cuGreenCtxDestroy",
            "cu*DeviceGraphMemTrim",
            "cuLinkCreate*",
            "cuLinkComplete",
            "cudaLibraryLoad*",
            "cudaExecutionCtxDestroy",
        ],
    ),
    (
        "the runtime calls the driver's function of that name, which is hooked",
        &["cudaMemPoolTrimTo", "cudaGraphInstantiate*", "cudaGraphExecDestroy"],
    ),
    (
        "memory of a graph is allocated when the executable graph is made or launched, not when the node is added",
        &["cu*GraphAddMemAllocNode", "cu*GraphAddMemFreeNode", "cu*GraphDestroyNode", "cu*GraphDestroy"],
    ),
    (
        "they concern other objects, or copy, launch and query",
        &[
            "cu*UnregisterAsyncNotification",
            "cu*LogsUnregisterCallback",
            "cuLinkAdd*",
            "cuLinkDestroy",
            "cu*BatchAsync*",
            "cu*MemRangeGetAttributes",
            "cuPointerGetAttributes",
            "cu*StreamDestroy*",
            "cu*EventDestroy*",
            "cu*DestroyExternalSemaphore",
            "cu*Launch*",
            "cu*UserObjectRelease",
            "cu*GraphReleaseUserObject",
            "cuTexRefDestroy",
            "cu*ObjectDestroy",
            "cudaDestroy*Object",
            "cuGetProcAddress*",
            "cudaGetDriverEntryPoint*",
            "cuMemGetAllocation*",
            "cuLogicalEndpoint*",
            "cuTensorMapSetAllocationClass",
        ],
    ),
];

/// The types of out-parameters that can be new memory.
const HANDLES: [&str; 17] = [
    "CUdeviceptr",
    "void *",
    "cudaArray_t",
    "CUarray",
    "CUmipmappedArray",
    "cudaMipmappedArray_t",
    "CUmemGenericAllocationHandle",
    "cudaPitchedPtr",
    "CUexternalMemory",
    "cudaExternalMemory_t",
    "CUcontext",
    "CUmodule",
    "CUlibrary",
    "CUgraphExec",
    "cudaGraphExec_t",
    "CUmemoryPool",
    "cudaMemPool_t",
];
/// Parts of the names of functions that give or take memory.
const NAMES: [&str; 10] =
    ["Alloc", "Free", "Destroy", "Unmap", "Unload", "Trim", "Release", "Close", "Unregister", "Malloc"];

/// The declared functions of a header by their exported symbols, with their parameters.
fn declarations(header: &str) -> BTreeMap<String, Vec<String>> {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code.push_str(rest);
    let (mut symbols, mut found) = (BTreeMap::new(), BTreeMap::new());
    let mut declaration = String::new();
    for line in code.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        // `#define cuMemAlloc cuMemAlloc_v2`: the symbol that programs link. The part of the header for the driver
        // itself undoes these and declares the older functions.
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["#define", name, symbol] if symbol.starts_with("cu") => _ = symbols.entry(name).or_insert(symbol),
            ["#undef", name] => _ = symbols.remove(name),
            _ => {
                declaration.push_str(line);
                declaration.push(' ');
                if line.contains(';') {
                    if let Some((name, parameters)) = function(&declaration) {
                        found.insert((*symbols.get(name).unwrap_or(&name)).to_owned(), parameters);
                    }
                    declaration.clear();
                }
            }
        }
    }
    found
}

/// The name and the parameters, if `declaration` is one of CUDA's functions.
fn function(declaration: &str) -> Option<(&str, Vec<String>)> {
    let (_, rest) = declaration.split_once("CUDAAPI").or_else(|| declaration.split_once("CUDARTAPI"))?;
    let (name, parameters) = rest.split_once(';')?.0.split_once('(')?;
    let (name, parameters) = (name.trim(), parameters.trim_end().trim_end_matches(')'));
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let parameters = parameters.split(',').map(|one| one.split_whitespace().collect::<Vec<_>>().join(" "));
    is_name.then(|| (name, parameters.filter(|one| !one.is_empty() && one != "void").collect()))
}

/// The number of parameters that each hook declares.
fn hooks() -> BTreeMap<String, usize> {
    let source = std::fs::read_to_string(root().join("interpose/src/cuda/functions.rs")).expect("the hooks");
    let (_, list) = source.split_once("\nhooks! {\n").expect("the list of hooks");
    let names = Api::ALL.iter().filter_map(|api| api.symbol());
    let count = |name: &str| {
        let (_, after) =
            list.split_once(&format!("\n    {name}(")).or_else(|| list.split_once(&format!("    {name}(")))?;
        Some((name.to_owned(), after.split_once(')')?.0.matches(": ").count()))
    };
    names.map(|name| count(name).unwrap_or_else(|| panic!("{name} has no hook"))).collect()
}

fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    for (index, part) in parts.iter().enumerate() {
        if index + 1 == parts.len() {
            return rest.ends_with(part);
        }
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.is_empty()
}

fn can_be_memory(name: &str, parameters: &[String]) -> bool {
    let is_handle = |parameter: &String| {
        let pointed = parameter.trim_start_matches("struct ").rsplit_once('*').map_or("", |(type_, _)| type_);
        HANDLES.contains(&pointed.trim_end())
    };
    NAMES.iter().any(|part| name.contains(part)) || parameters.iter().any(is_handle)
}

#[test]
fn every_function_of_the_headers_that_can_give_memory_is_hooked_or_has_a_reason() {
    let hooks = hooks();
    let (mut declared, mut explained, mut failures) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for (package, folder) in HEADERS {
        let folder = Path::new(&packages(&[package])).join(folder);
        for header in ["cuda.h", "cuda_runtime_api.h"] {
            let text = std::fs::read(folder.join(header)).unwrap_or_else(|error| panic!("{package} {header}: {error}"));
            let functions = declarations(&String::from_utf8_lossy(&text));
            assert!(functions.len() > 300, "{package} {header}: {}", functions.len());
            for (name, parameters) in functions {
                if let Some(count) = hooks.get(&name) {
                    if *count != parameters.len() {
                        failures.push(format!("{package}: the hook has {count}: {name}({})", parameters.join(", ")));
                    }
                    declared.insert(name);
                } else if can_be_memory(&name, &parameters) {
                    match NOT_HOOKED.iter().flat_map(|(_, names)| *names).find(|one| matches(one, &name)) {
                        Some(pattern) => _ = explained.insert(*pattern),
                        None => failures.push(format!("{package}: not hooked: {name}({})", parameters.join(", "))),
                    }
                }
            }
        }
    }
    // The function for programs whose threads have default streams of their own has the same parameters.
    let is_declared = |name: &str| declared.contains(name.strip_suffix("_ptsz").unwrap_or(name));
    let undeclared = hooks.keys().filter(|name| !is_declared(name));
    failures.extend(undeclared.map(|name| format!("no header declares {name}")));
    let unused = NOT_HOOKED.iter().flat_map(|(_, names)| *names).filter(|name| !explained.contains(*name));
    failures.extend(unused.map(|name| format!("no function is called {name}")));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
