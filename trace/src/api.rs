//! The known CUDA functions: wire number, exported symbol, API, and their effect on memory.
//!
//! The numbers are part of the trace file, so a number is never reused or changed. An unknown function keeps its number
//! and has no name.

use crate::source::Source;

/// A CUDA function, identified by its wire number ([`Api::symbol`] has its name).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Api(pub u16);

/// The kind of memory that a function concerns.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemoryKind {
    /// Device memory at an address.
    Device,
    /// Device memory from a stream-ordered pool.
    Pool,
    /// Managed (unified) memory.
    Managed,
    /// Page-locked host memory, allocated by CUDA.
    Host,
    /// The program's own host memory, page-locked by CUDA.
    Registered,
    /// An array or mipmapped array: an opaque handle.
    Array,
    /// Physical memory behind a VMM handle.
    Physical,
    /// A mapping of physical memory, a reservation of addresses, or a handle for another process. It has no memory of
    /// its own.
    Address,
    /// Memory of another process, opened in this one. It has no memory of its own.
    Imported,
    /// Memory that the driver takes for itself: contexts, modules, kernels. No call says how much.
    Driver,
}

macro_rules! apis {
    ($($number:literal $symbol:ident $source:ident $memory:ident $verb:ident;)*) => {
        #[allow(non_upper_case_globals)]
        impl Api {
            $(
                #[doc = concat!("`", stringify!($symbol), "`")]
                pub const $symbol: Api = Api($number);
            )*

            /// All known functions, in order of their numbers.
            pub const ALL: &'static [Api] = &[$(Api($number)),*];

            /// The name of the exported symbol. `None` for an unknown function.
            pub const fn symbol(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($symbol)),)*
                    _ => None,
                }
            }

            /// The API that the function belongs to. `None` for an unknown function.
            pub const fn source(self) -> Option<Source> {
                match self.0 {
                    $($number => Some(Source::$source),)*
                    _ => None,
                }
            }

            /// The kind of memory that the function concerns. `None` for functions about CUDA graphs and for an unknown
            /// function.
            ///
            /// A free states the kind that its usual counterpart allocates. The address decides what was really freed.
            pub const fn memory_kind(self) -> Option<MemoryKind> {
                match self.0 {
                    $($number => apis!(@kind $memory),)*
                    _ => None,
                }
            }

            /// Whether the function frees memory. `false` for an unknown function.
            pub const fn frees(self) -> bool {
                match self.0 {
                    $($number => apis!(@frees $verb),)*
                    _ => false,
                }
            }
        }
    };
    (@kind None) => { None };
    (@kind $memory:ident) => { Some(MemoryKind::$memory) };
    (@frees allocates) => { false };
    (@frees captures) => { false };
    (@frees exports) => { false };
    (@frees frees) => { true };
}

/// What a call does with a CUDA graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GraphCall {
    /// Starts to capture a stream.
    BeginCapture,
    /// Ends a capture. The result is a graph.
    EndCapture,
    /// Makes an executable graph.
    Instantiate,
    /// Copies an executable graph to the device before its first launch.
    Upload,
    /// Destroys an executable graph.
    Destroy,
}

impl Api {
    /// What the function does with a CUDA graph. `None` if it concerns none.
    pub const fn graph_call(self) -> Option<GraphCall> {
        match self.0 {
            48..=51 => Some(GraphCall::BeginCapture),
            52 | 53 => Some(GraphCall::EndCapture),
            54..=57 => Some(GraphCall::Instantiate),
            58 | 59 => Some(GraphCall::Upload),
            60 => Some(GraphCall::Destroy),
            _ => None,
        }
    }

    /// Whether the function makes a handle of memory for another process.
    pub const fn exports(self) -> bool {
        matches!(self, Api::cuIpcGetMemHandle | Api::cudaIpcGetMemHandle)
    }

    /// The value for events that are no CUDA calls.
    pub const NONE: Api = Api(0);
}

apis! {
    1 cuMemAlloc_v2 Driver Device allocates;
    2 cuMemAllocPitch_v2 Driver Device allocates;
    3 cuMemAllocManaged Driver Managed allocates;
    4 cuMemAllocAsync Driver Pool allocates;
    5 cuMemAllocAsync_ptsz Driver Pool allocates;
    6 cuMemAllocFromPoolAsync Driver Pool allocates;
    7 cuMemAllocFromPoolAsync_ptsz Driver Pool allocates;
    8 cuMemFreeAsync Driver Pool frees;
    9 cuMemFreeAsync_ptsz Driver Pool frees;
    10 cuMemFree_v2 Driver Device frees;
    11 cuMemCreate Driver Physical allocates;
    12 cuMemRelease Driver Physical frees;
    13 cuMemMap Driver Address allocates;
    14 cuMemUnmap Driver Address frees;
    15 cuMemAddressReserve Driver Address allocates;
    16 cuMemAddressFree Driver Address frees;
    17 cuMemHostAlloc Driver Host allocates;
    18 cuMemAllocHost_v2 Driver Host allocates;
    19 cuMemHostRegister_v2 Driver Registered allocates;
    20 cuMemHostUnregister Driver Registered frees;
    21 cuMemFreeHost Driver Host frees;
    22 cuArrayCreate_v2 Driver Array allocates;
    23 cuArray3DCreate_v2 Driver Array allocates;
    24 cuArrayDestroy Driver Array frees;
    25 cuMipmappedArrayCreate Driver Array allocates;
    26 cuMipmappedArrayDestroy Driver Array frees;
    27 cuIpcOpenMemHandle_v2 Driver Imported allocates;
    28 cuIpcCloseMemHandle Driver Imported frees;
    29 cuMemPoolTrimTo Driver Pool frees;
    30 cuMemImportFromShareableHandle Driver Imported allocates;
    31 cuMemRetainAllocationHandle Driver Address allocates;
    32 cuDevicePrimaryCtxRetain Driver Driver allocates;
    33 cuModuleLoad Driver Driver allocates;
    34 cuModuleLoadData Driver Driver allocates;
    35 cuModuleLoadDataEx Driver Driver allocates;
    36 cuModuleLoadFatBinary Driver Driver allocates;
    37 cuLibraryLoadData Driver Driver allocates;
    38 cuLibraryLoadFromFile Driver Driver allocates;
    39 cuIpcGetMemHandle Driver Address exports;
    40 cuCtxCreate Driver Driver allocates;
    41 cuCtxCreate_v2 Driver Driver allocates;
    42 cuCtxCreate_v3 Driver Driver allocates;
    43 cuCtxCreate_v4 Driver Driver allocates;
    48 cuStreamBeginCapture_v2 Driver None captures;
    49 cuStreamBeginCapture_v2_ptsz Driver None captures;
    50 cuStreamBeginCaptureToGraph Driver None captures;
    51 cuStreamBeginCaptureToGraph_ptsz Driver None captures;
    52 cuStreamEndCapture Driver None captures;
    53 cuStreamEndCapture_ptsz Driver None captures;
    54 cuGraphInstantiate_v2 Driver None captures;
    55 cuGraphInstantiateWithFlags Driver None captures;
    56 cuGraphInstantiateWithParams Driver None captures;
    57 cuGraphInstantiateWithParams_ptsz Driver None captures;
    58 cuGraphUpload Driver None captures;
    59 cuGraphUpload_ptsz Driver None captures;
    60 cuGraphExecDestroy Driver None captures;
    64 cudaMalloc Runtime Device allocates;
    65 cudaMallocPitch Runtime Device allocates;
    66 cudaMalloc3D Runtime Device allocates;
    67 cudaMallocManaged Runtime Managed allocates;
    68 cudaMallocAsync Runtime Pool allocates;
    69 cudaMallocAsync_ptsz Runtime Pool allocates;
    70 cudaMallocFromPoolAsync Runtime Pool allocates;
    71 cudaMallocFromPoolAsync_ptsz Runtime Pool allocates;
    72 cudaFreeAsync Runtime Pool frees;
    73 cudaFreeAsync_ptsz Runtime Pool frees;
    74 cudaFree Runtime Device frees;
    75 cudaMallocHost Runtime Host allocates;
    76 cudaHostAlloc Runtime Host allocates;
    77 cudaHostRegister Runtime Registered allocates;
    78 cudaHostUnregister Runtime Registered frees;
    79 cudaFreeHost Runtime Host frees;
    80 cudaMallocArray Runtime Array allocates;
    81 cudaMalloc3DArray Runtime Array allocates;
    82 cudaFreeArray Runtime Array frees;
    83 cudaMallocMipmappedArray Runtime Array allocates;
    84 cudaFreeMipmappedArray Runtime Array frees;
    85 cudaIpcOpenMemHandle Runtime Imported allocates;
    86 cudaIpcCloseMemHandle Runtime Imported frees;
    87 cudaIpcGetMemHandle Runtime Address exports;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_symbols_match_their_api() {
        for (i, api) in Api::ALL.iter().enumerate() {
            assert!(!Api::ALL[..i].contains(api), "{api:?} twice");
            let symbol = api.symbol().unwrap();
            let runtime = symbol.starts_with("cuda");
            assert_eq!(api.source(), Some(if runtime { Source::Runtime } else { Source::Driver }), "{symbol}");
        }
        assert_eq!(Api(9999).symbol(), None);
    }
}
