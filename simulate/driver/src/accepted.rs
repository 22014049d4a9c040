//! Functions that have no effect here, because no kernel runs, and give nothing back. They succeed.

use std::ffi::c_int;

macro_rules! accept {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            0
        }
    )*};
}

accept! {
    cuCtxResetPersistingL2Cache
    cuCtxSetCacheConfig
    cuCtxSetFlags
    cuCtxSetSharedMemConfig
    cuFuncLoad
    cuFuncSetAttribute
    cuFuncSetCacheConfig
    cuFuncSetSharedMemConfig
    cuKernelSetAttribute
    cuKernelSetCacheConfig
    cuMemAdvise_v2
    cuMemPrefetchAsync_v2
    cuProfilerStart
    cuProfilerStop
    cuStreamCopyAttributes
    cuStreamSetAttribute
    cuTensorMapEncodeIm2col
    cuTensorMapEncodeIm2colWide
    cuTensorMapEncodeTiled
    cuTensorMapReplaceAddress
}
