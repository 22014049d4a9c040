//! cuDNN: handles, versions, and one algorithm for every operation of the old interface, which PyTorch uses for
//! convolutions only with `TORCH_CUDNN_V8_API_DISABLED=1`.
//!
//! `SIMCUDA_CUDNN_WORKSPACE` is the workspace that every convolution requests, in bytes. Without it, convolutions of
//! the old interface request nothing, and those of the backend interface what was measured. With `smallest` or
//! `largest`, convolutions that were not measured request the end of the range that similar ones give.

mod algorithm;
mod backend;
mod estimates;
mod recurrent;
mod tensor;

use crate::support::{Handle, handles};
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

/// The workspaces that convolutions request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Requests {
    /// Those that were measured, or else that of the most similar convolution.
    Likely,
    /// Those that were measured, or else the smallest of the range.
    Smallest,
    /// Those that were measured, or else the largest of the range.
    Largest,
    /// So many bytes.
    Fixed(u64),
}

/// The setting for the workspaces of this process.
fn requests() -> Requests {
    static REQUESTS: OnceLock<Requests> = OnceLock::new();
    *REQUESTS.get_or_init(|| match std::env::var("SIMCUDA_CUDNN_WORKSPACE").as_deref() {
        Ok("smallest") => Requests::Smallest,
        Ok("largest") => Requests::Largest,
        Ok(size) => simcuda::config::parse_size(size).map_or(Requests::Likely, Requests::Fixed),
        Err(_) => Requests::Likely,
    })
}

/// The workspace that a convolution of the old interface requests in bytes.
fn workspace() -> usize {
    match requests() {
        Requests::Fixed(bytes) => bytes as usize,
        _ => 0,
    }
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
