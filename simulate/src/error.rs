//! The errors of the simulation, with CUDA's numbers.
//!
//! `CUresult` and `cudaError_t` agree for every error used here, so one type serves both layers.

use std::fmt;

/// A CUDA error. Success is not a variant, because the functions return `Result`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Error {
    /// An argument is out of range or a pointer is unknown.
    InvalidValue = 1,
    /// The device or the host has not enough memory left.
    OutOfMemory = 2,
    /// No device is visible.
    NoDevice = 100,
    /// The ordinal names no visible device.
    InvalidDevice = 101,
    /// No context is current, or the handle names none.
    InvalidContext = 201,
    /// The host could not map the memory.
    MapFailed = 205,
    /// The device cannot access the memory of the other one.
    PeerAccessUnsupported = 217,
    /// A stream, event, graph or other handle is unknown.
    InvalidHandle = 400,
    /// The object's state does not allow the call.
    IllegalState = 401,
    /// The name or address is unknown.
    NotFound = 500,
    /// The work is not finished yet.
    NotReady = 600,
    /// The host range is already registered, wholly or in part.
    HostMemoryAlreadyRegistered = 712,
    /// The host range is not registered.
    HostMemoryNotRegistered = 713,
    /// The call is forbidden here.
    NotPermitted = 800,
    /// The simulation or the simulated device does not support this.
    NotSupported = 801,
    /// A capturing stream does not allow this call.
    StreamCaptureUnsupported = 900,
}

/// The result of a simulated call.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// CUDA's number of the error.
    pub fn code(self) -> i32 {
        self as i32
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(self.code()).1.to_string_lossy())
    }
}

impl std::error::Error for Error {}

/// The number of a result: 0, or the number of the error.
pub fn code_of<T>(result: &Result<T>) -> i32 {
    result.as_ref().err().map_or(0, |e| e.code())
}

/// The driver's name, the text and the runtime's name of an error number, as static C strings.
pub fn describe(code: i32) -> (&'static std::ffi::CStr, &'static std::ffi::CStr, &'static std::ffi::CStr) {
    match code {
        0 => (c"CUDA_SUCCESS", c"no error", c"cudaSuccess"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument", c"cudaErrorInvalidValue"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory", c"cudaErrorMemoryAllocation"),
        100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected", c"cudaErrorNoDevice"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal", c"cudaErrorInvalidDevice"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context", c"cudaErrorDeviceUninitialized"),
        205 => (c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed", c"cudaErrorMapBufferObjectFailed"),
        217 => (
            c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            c"peer access is not supported between these two devices",
            c"cudaErrorPeerAccessUnsupported",
        ),
        400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle", c"cudaErrorInvalidResourceHandle"),
        401 => (
            c"CUDA_ERROR_ILLEGAL_STATE",
            c"the operation cannot be performed in the present state",
            c"cudaErrorIllegalState",
        ),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found", c"cudaErrorSymbolNotFound"),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready", c"cudaErrorNotReady"),
        712 => (
            c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            c"part or all of the requested memory range is already mapped",
            c"cudaErrorHostMemoryAlreadyRegistered",
        ),
        713 => (
            c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            c"pointer does not correspond to a registered memory region",
            c"cudaErrorHostMemoryNotRegistered",
        ),
        800 => (c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted", c"cudaErrorNotPermitted"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported", c"cudaErrorNotSupported"),
        900 => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            c"operation not permitted when stream is capturing",
            c"cudaErrorStreamCaptureUnsupported",
        ),
        _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error", c"cudaErrorUnknown"),
    }
}
