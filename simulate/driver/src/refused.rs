//! Functions that the simulated driver exports but does not support. They return "not supported" and are counted like
//! stubs.

use crate::state::machine;
use simcuda::error::Error;
use std::ffi::c_int;

macro_rules! refuse {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            machine().stub(stringify!($name));
            Error::NotSupported.code()
        }
    )*};
}

refuse! {
    cuCtxFromGreenCtx
    cuDevResourceGenerateDesc
    cuDevSmResourceSplitByCount
    cuDeviceGetDevResource
    cuGreenCtxCreate
    cuGreenCtxDestroy
    cuGreenCtxStreamCreate
    cuLinkAddData_v2
    cuLinkComplete
    cuLinkCreate_v2
    cuLinkDestroy
    cuMulticastAddDevice
    cuMulticastBindMem
    cuMulticastCreate
    cuMulticastGetGranularity
    cuMulticastUnbind
}
