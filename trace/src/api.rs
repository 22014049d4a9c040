//! The hooked CUDA functions: wire number, exported symbol, API, and their effect on memory.
//!
//! The numbers are part of the trace file, so a number is never reused or changed. An unknown function keeps its number
//! and has no name.

use crate::action::Action;
use crate::named;
use crate::source::Source;

/// A CUDA function, identified by its wire number ([`Api::symbol`] has its name).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Api(pub u16);

/// The result of a call that lacks memory: `CUDA_ERROR_OUT_OF_MEMORY` and `cudaErrorMemoryAllocation`.
pub const OUT_OF_MEMORY: i32 = 2;

named! {
    /// The kind of memory that a function concerns. The names are those in `trace/FORMAT.md`.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum MemoryKind {
        /// Device memory at an address.
        Device => "device",
        /// Device memory from a stream-ordered pool.
        Pool => "pool",
        /// Managed (unified) memory.
        Managed => "managed",
        /// Page-locked host memory, allocated by CUDA.
        Host => "host",
        /// The program's own host memory, page-locked by CUDA.
        Registered => "registered",
        /// An array or mipmapped array: an opaque handle.
        Array => "array",
        /// Physical memory behind a VMM handle.
        Physical => "physical",
        /// A mapping of physical memory, a reservation of addresses, or a handle for another process. It has no memory
        /// of its own.
        Address => "address",
        /// Memory of another process, opened in this one. It has no memory of its own.
        Imported => "imported",
        /// Memory that the driver takes for itself: contexts, modules, kernels. No call says how much.
        Driver => "driver",
    }
}

named! {
    /// The effect of a call. The names are those in `trace/FORMAT.md`.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum Effect {
        /// Allocates, maps or reserves memory.
        Allocates => "allocates",
        /// Adds a reference to a handle of physical memory. The handle may be new to the process.
        Retains => "retains",
        /// Frees or unmaps memory.
        Frees => "frees",
        /// Gives unused memory of a pool back.
        Trims => "trims",
        /// Makes a handle of memory for another process.
        Exports => "exports",
        /// Creates a context.
        CreatesContext => "creates_context",
        /// Loads kernels.
        LoadsCode => "loads_code",
        /// Starts to capture a stream into a CUDA graph.
        BeginsCapture => "begins_capture",
        /// Ends a capture. The result is a graph.
        EndsCapture => "ends_capture",
        /// Makes an executable graph.
        Instantiates => "instantiates",
        /// Copies an executable graph to the device before its first launch.
        Uploads => "uploads",
        /// Destroys an executable graph.
        DestroysGraph => "destroys_graph",
    }
}

/// Expands a macro with the table of all hooked functions: the only place that lists them. Tokens before the table in
/// the expansion follow the macro's name here.
///
/// The columns: wire number, symbol, [`Source`], [`MemoryKind`] (`None` for functions about CUDA graphs), [`Effect`],
/// and the [`Action`] of the events. `as NAME since VERSION` is the name under which `cuGetProcAddress` returns the
/// function from this CUDA version on (cuda.h). Without `since`, the interfaces of that name differ in their arguments,
/// or in the default stream (`_ptsz`).
#[macro_export]
macro_rules! hooked_functions {
    ($macro:ident $($before:tt)?) => {
        $macro! { $($before)?
            1 cuMemAlloc_v2 Driver Device Allocates Alloc as cuMemAlloc since 3020;
            2 cuMemAllocPitch_v2 Driver Device Allocates Alloc as cuMemAllocPitch since 3020;
            3 cuMemAllocManaged Driver Managed Allocates Alloc;
            4 cuMemAllocAsync Driver Pool Allocates Alloc;
            5 cuMemAllocAsync_ptsz Driver Pool Allocates Alloc as cuMemAllocAsync;
            6 cuMemAllocFromPoolAsync Driver Pool Allocates Alloc;
            7 cuMemAllocFromPoolAsync_ptsz Driver Pool Allocates Alloc as cuMemAllocFromPoolAsync;
            8 cuMemFreeAsync Driver Pool Frees FreeCompleted;
            9 cuMemFreeAsync_ptsz Driver Pool Frees FreeCompleted as cuMemFreeAsync;
            10 cuMemFree_v2 Driver Device Frees FreeCompleted as cuMemFree since 3020;
            11 cuMemCreate Driver Physical Allocates Alloc;
            12 cuMemRelease Driver Physical Frees FreeCompleted;
            13 cuMemMap Driver Address Allocates Map;
            14 cuMemUnmap Driver Address Frees Unmap;
            15 cuMemAddressReserve Driver Address Allocates Reserve;
            16 cuMemAddressFree Driver Address Frees Unreserve;
            17 cuMemHostAlloc Driver Host Allocates Alloc;
            18 cuMemAllocHost_v2 Driver Host Allocates Alloc as cuMemAllocHost since 3020;
            19 cuMemHostRegister_v2 Driver Registered Allocates Alloc as cuMemHostRegister since 6050;
            20 cuMemHostUnregister Driver Registered Frees FreeCompleted;
            21 cuMemFreeHost Driver Host Frees FreeCompleted;
            22 cuArrayCreate_v2 Driver Array Allocates Alloc as cuArrayCreate since 3020;
            23 cuArray3DCreate_v2 Driver Array Allocates Alloc as cuArray3DCreate since 3020;
            24 cuArrayDestroy Driver Array Frees FreeCompleted;
            25 cuMipmappedArrayCreate Driver Array Allocates Alloc;
            26 cuMipmappedArrayDestroy Driver Array Frees FreeCompleted;
            27 cuIpcOpenMemHandle_v2 Driver Imported Allocates Alloc as cuIpcOpenMemHandle since 11000;
            28 cuIpcCloseMemHandle Driver Imported Frees FreeCompleted;
            29 cuMemPoolTrimTo Driver Pool Trims Totals;
            30 cuMemImportFromShareableHandle Driver Imported Retains Alloc;
            31 cuMemRetainAllocationHandle Driver Address Retains Alloc;
            32 cuDevicePrimaryCtxRetain Driver Driver CreatesContext DeviceUsage;
            33 cuModuleLoad Driver Driver LoadsCode DeviceUsage;
            34 cuModuleLoadData Driver Driver LoadsCode DeviceUsage;
            35 cuModuleLoadDataEx Driver Driver LoadsCode DeviceUsage;
            36 cuModuleLoadFatBinary Driver Driver LoadsCode DeviceUsage;
            37 cuLibraryLoadData Driver Driver LoadsCode DeviceUsage;
            38 cuLibraryLoadFromFile Driver Driver LoadsCode DeviceUsage;
            39 cuIpcGetMemHandle Driver Address Exports Alloc;
            40 cuCtxCreate Driver Driver CreatesContext DeviceUsage as cuCtxCreate;
            41 cuCtxCreate_v2 Driver Driver CreatesContext DeviceUsage as cuCtxCreate;
            42 cuCtxCreate_v3 Driver Driver CreatesContext DeviceUsage as cuCtxCreate;
            43 cuCtxCreate_v4 Driver Driver CreatesContext DeviceUsage as cuCtxCreate;
            48 cuStreamBeginCapture_v2 Driver None BeginsCapture Graph as cuStreamBeginCapture since 10010;
            49 cuStreamBeginCapture_v2_ptsz Driver None BeginsCapture Graph as cuStreamBeginCapture since 10010;
            50 cuStreamBeginCaptureToGraph Driver None BeginsCapture Graph;
            51 cuStreamBeginCaptureToGraph_ptsz Driver None BeginsCapture Graph as cuStreamBeginCaptureToGraph;
            52 cuStreamEndCapture Driver None EndsCapture Graph;
            53 cuStreamEndCapture_ptsz Driver None EndsCapture Graph as cuStreamEndCapture;
            54 cuGraphInstantiate_v2 Driver None Instantiates Graph as cuGraphInstantiate since 11000;
            55 cuGraphInstantiateWithFlags Driver None Instantiates Graph as cuGraphInstantiate since 12000;
            56 cuGraphInstantiateWithParams Driver None Instantiates Graph;
            57 cuGraphInstantiateWithParams_ptsz Driver None Instantiates Graph as cuGraphInstantiateWithParams;
            58 cuGraphUpload Driver None Uploads Graph;
            59 cuGraphUpload_ptsz Driver None Uploads Graph as cuGraphUpload;
            60 cuGraphExecDestroy Driver None DestroysGraph Graph;
            64 cudaMalloc Runtime Device Allocates Alloc;
            65 cudaMallocPitch Runtime Device Allocates Alloc;
            66 cudaMalloc3D Runtime Device Allocates Alloc;
            67 cudaMallocManaged Runtime Managed Allocates Alloc;
            68 cudaMallocAsync Runtime Pool Allocates Alloc;
            69 cudaMallocAsync_ptsz Runtime Pool Allocates Alloc;
            70 cudaMallocFromPoolAsync Runtime Pool Allocates Alloc;
            71 cudaMallocFromPoolAsync_ptsz Runtime Pool Allocates Alloc;
            72 cudaFreeAsync Runtime Pool Frees FreeCompleted;
            73 cudaFreeAsync_ptsz Runtime Pool Frees FreeCompleted;
            74 cudaFree Runtime Device Frees FreeCompleted;
            75 cudaMallocHost Runtime Host Allocates Alloc;
            76 cudaHostAlloc Runtime Host Allocates Alloc;
            77 cudaHostRegister Runtime Registered Allocates Alloc;
            78 cudaHostUnregister Runtime Registered Frees FreeCompleted;
            79 cudaFreeHost Runtime Host Frees FreeCompleted;
            80 cudaMallocArray Runtime Array Allocates Alloc;
            81 cudaMalloc3DArray Runtime Array Allocates Alloc;
            82 cudaFreeArray Runtime Array Frees FreeCompleted;
            83 cudaMallocMipmappedArray Runtime Array Allocates Alloc;
            84 cudaFreeMipmappedArray Runtime Array Frees FreeCompleted;
            85 cudaIpcOpenMemHandle Runtime Imported Allocates Alloc;
            86 cudaIpcCloseMemHandle Runtime Imported Frees FreeCompleted;
            87 cudaIpcGetMemHandle Runtime Address Exports Alloc;
        }
    };
}

macro_rules! apis {
    (
        $($number:literal $symbol:ident $Source:ident $Memory:ident $Effect:ident $Action:ident
        $(as $entry:ident $(since $version:literal)?)?;)*
    ) => {
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
                match self.0 { $($number => Some(stringify!($symbol)),)* _ => None }
            }

            /// The API that the function belongs to. `None` for an unknown function.
            pub const fn source(self) -> Option<Source> {
                match self.0 { $($number => Some(Source::$Source),)* _ => None }
            }

            /// The kind of memory that the function concerns. `None` for functions about CUDA graphs and for an unknown
            /// function.
            ///
            /// A free states the kind that its usual counterpart allocates. The address decides what was really freed.
            pub const fn memory_kind(self) -> Option<MemoryKind> {
                match self.0 { $($number => apis!(@kind $Memory),)* _ => None }
            }

            /// The effect of a call. `None` for an unknown function.
            pub const fn effect(self) -> Option<Effect> {
                match self.0 { $($number => Some(Effect::$Effect),)* _ => None }
            }

            /// The action of the function's events. `None` for an unknown function.
            pub const fn action(self) -> Option<Action> {
                match self.0 { $($number => Some(Action::$Action),)* _ => None }
            }
        }
    };
    (@kind None) => { None };
    (@kind $Memory:ident) => { Some(MemoryKind::$Memory) };
}

hooked_functions!(apis);

impl Api {
    /// The value for events that are no CUDA calls.
    pub const NONE: Api = Api(0);

    /// Whether the function frees memory. `false` for an unknown function.
    pub const fn frees(self) -> bool {
        matches!(self.effect(), Some(Effect::Frees | Effect::Trims))
    }

    /// Whether the function makes a handle of memory for another process.
    pub const fn exports(self) -> bool {
        matches!(self.effect(), Some(Effect::Exports))
    }

    /// Whether the function adds a reference to a handle of physical memory.
    pub const fn retains(self) -> bool {
        matches!(self.effect(), Some(Effect::Retains))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_and_symbols_match_their_api() {
        assert!(Api::ALL.is_sorted_by(|before, after| before < after));
        for api in Api::ALL {
            let symbol = api.symbol().unwrap();
            let runtime = symbol.starts_with("cuda");
            assert_eq!(api.source(), Some(if runtime { Source::Runtime } else { Source::Driver }), "{symbol}");
        }
        assert_eq!(Api(9999).symbol(), None);
    }
}
