//! cuDNN: handles, versions, workspace sizes, one algorithm for every operation, and the backend (graph) interface.
//!
//! `SIMCUDA_CUDNN_WORKSPACE` is the workspace that every convolution requests, in bytes. The default is 0.

mod recurrent;
mod tensor;

use crate::support::{Handle, create, handles, launch};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// `CUDNN_STATUS_BAD_PARAM`
const INVALID: c_int = 2000;
/// `CUDNN_STATUS_NOT_SUPPORTED`
const NOT_SUPPORTED: c_int = 3000;

handles! {
    cudnnCreate / cudnnDestroy;
    cudnnCreateActivationDescriptor / cudnnDestroyActivationDescriptor;
    cudnnCreateCTCLossDescriptor / cudnnDestroyCTCLossDescriptor;
    cudnnCreateConvolutionDescriptor / cudnnDestroyConvolutionDescriptor;
    cudnnCreateFilterDescriptor / cudnnDestroyFilterDescriptor;
    cudnnCreatePoolingDescriptor / cudnnDestroyPoolingDescriptor;
    cudnnCreateSpatialTransformerDescriptor / cudnnDestroySpatialTransformerDescriptor;
}

/// The simulated version, 9.19.0: major, minor, patch level.
const VERSION: [c_int; 3] = [9, 19, 0];

fn workspace() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let text = std::env::var("SIMCUDA_CUDNN_WORKSPACE").unwrap_or_default();
        simcuda::config::parse_size(&text).unwrap_or(0) as usize
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetStream(handle: Option<&mut Handle>, stream: u64) -> c_int {
    let Some(handle) = handle else { return INVALID };
    handle.stream = stream;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetStream(handle: Option<&Handle>, stream: Out<u64>) -> c_int {
    stream.put(handle.map_or(0, |h| h.stream));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    (VERSION[0] * 10000 + VERSION[1] * 100 + VERSION[2]) as usize
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetCudartVersion() -> usize {
    13000
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetProperty(which: c_int, value: Out<c_int>) -> c_int {
    let number = usize::try_from(which).ok().and_then(|i| VERSION.get(i)).copied().unwrap_or(0);
    value.put(number);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(_status: c_int) -> *const c_char {
    c"simulated cuDNN status".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetLastErrorString(text: Out<c_char>, length: usize) {
    if length > 0 {
        text.put(0);
    }
}

/// Declares functions that return a size through their last argument.
macro_rules! sizes {
    ($($name:ident($($argument:ident),*) = $bytes:expr;)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)]
        extern "C" fn $name($($argument: *const c_void,)* size: Out<usize>) -> c_int {
            size.put($bytes);
            0
        }
    )*};
}

sizes! {
    cudnnGetConvolutionForwardWorkspaceSize(_h, _a, _b, _c, _d, _algo) = workspace();
    cudnnGetConvolutionBackwardDataWorkspaceSize(_h, _a, _b, _c, _d, _algo) = workspace();
    cudnnGetConvolutionBackwardFilterWorkspaceSize(_h, _a, _b, _c, _d, _algo) = workspace();
    cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_h, _m, _o, _x, _z, _y, _b, _a) = 0;
    cudnnGetBatchNormalizationTrainingExReserveSpaceSize(_h, _m, _o, _a, _x) = 0;
    cudnnGetBatchNormalizationBackwardExWorkspaceSize(_h, _m, _o, _x, _y, _dy, _dz, _dx, _b, _a) = 0;
    cudnnGetCTCLossWorkspaceSize(_h, _p, _g, _l, _ll, _il, _algo, _d) = 0;
}

/// The size of a `cudnnConvolution...AlgoPerf_t` and the offset of its memory field, in bytes. All other fields are 0,
/// which means algorithm 0 and success.
const PERF_BYTES: usize = 48;
const PERF_MEMORY: usize = 16;

fn one_algorithm(requested: c_int, found: Out<c_int>, perf: Out<[u8; PERF_BYTES]>) -> c_int {
    if requested > 0 {
        perf.put([0; PERF_BYTES]);
        perf.cast::<u8>().nth(PERF_MEMORY).cast().put(workspace());
    }
    found.put(c_int::from(requested > 0));
    0
}

macro_rules! algorithms {
    ($($name:ident($($argument:ident),*);)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)]
        extern "C" fn $name(
            $($argument: *const c_void,)*
            requested: c_int,
            found: Out<c_int>,
            perf: Out<[u8; PERF_BYTES]>,
        ) -> c_int {
            one_algorithm(requested, found, perf)
        }
    )*};
}

algorithms! {
    cudnnGetConvolutionForwardAlgorithm_v7(_h, _a, _b, _c, _d);
    cudnnGetConvolutionBackwardDataAlgorithm_v7(_h, _a, _b, _c, _d);
    cudnnGetConvolutionBackwardFilterAlgorithm_v7(_h, _a, _b, _c, _d);
    cudnnFindConvolutionForwardAlgorithmEx(_h, _a, _x, _b, _y, _c, _d, _z);
    cudnnFindConvolutionBackwardDataAlgorithmEx(_h, _a, _x, _b, _y, _c, _d, _z);
    cudnnFindConvolutionBackwardFilterAlgorithmEx(_h, _a, _x, _b, _y, _c, _d, _z);
}

// The backend interface. The heuristics offer one engine configuration, without notes or knobs. Every requested number
// is 0, except the plan's workspace.

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendCreateDescriptor(_kind: c_int, out: Out<Box<Handle>>) -> c_int {
    create(out)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendDestroyDescriptor(_descriptor: Option<Box<Handle>>) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendExecute(handle: Option<&Handle>, _plan: *const c_void, _pack: *const c_void) -> c_int {
    launch(handle.map_or(0, |h| h.stream));
    0
}

/// `cudnnBackendAttributeName_t`
mod name {
    pub(super) const ENGINECFG_KNOB_CHOICES: i32 = 302;
    pub(super) const EXECUTION_PLAN_WORKSPACE_SIZE: i32 = 402;
    pub(super) const OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: i32 = 802;
    pub(super) const ENGINE_KNOB_INFO: i32 = 1302;
    pub(super) const ENGINE_NUMERICAL_NOTE: i32 = 1303;
    pub(super) const ENGINE_BEHAVIOR_NOTE: i32 = 1305;
}

/// `cudnnBackendAttributeType_t`
mod kind {
    pub(super) const HANDLE: i32 = 0;
    pub(super) const BOOLEAN: i32 = 2;
    pub(super) const INT64: i32 = 3;
    pub(super) const DOUBLE: i32 = 5;
    pub(super) const VOID_PTR: i32 = 6;
    pub(super) const BACKEND_DESCRIPTOR: i32 = 15;
    pub(super) const CHAR: i32 = 24;
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendGetAttribute(
    _descriptor: *const c_void,
    attribute: c_int,
    type_: c_int,
    requested: i64,
    count: Out<i64>,
    out: Out<u8>,
) -> c_int {
    let room = !out.is_null() && requested > 0;
    let number = match attribute {
        name::EXECUTION_PLAN_WORKSPACE_SIZE => workspace() as i64,
        name::OPERATIONGRAPH_ENGINE_GLOBAL_COUNT => 1,
        _ => 0,
    };
    let elements = match (attribute, type_) {
        (
            name::ENGINE_KNOB_INFO
            | name::ENGINE_NUMERICAL_NOTE
            | name::ENGINE_BEHAVIOR_NOTE
            | name::ENGINECFG_KNOB_CHOICES,
            _,
        ) => 0,
        // The caller's own descriptors stay unchanged.
        (_, kind::BACKEND_DESCRIPTOR) => 1,
        (_, kind::CHAR) => {
            let text = b"{}\0";
            if room && requested as usize >= text.len() {
                out.cast().put(*text);
            }
            text.len() as i64
        }
        (_, type_) => {
            if room {
                match type_ {
                    kind::HANDLE | kind::INT64 | kind::DOUBLE | kind::VOID_PTR => out.cast().put(number),
                    kind::BOOLEAN => out.put(0),
                    _ => out.cast::<i32>().put(0),
                }
            }
            1
        }
    };
    count.put(elements);
    0
}
