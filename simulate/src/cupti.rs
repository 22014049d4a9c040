//! The part of CUPTI's callback interface that the simulated libraries share (cupti_callbacks.h).

use std::ffi::{c_char, c_int, c_void};

/// `CUPTI_CB_DOMAIN_DRIVER_API`
pub const DOMAIN_DRIVER_API: c_int = 1;
/// `CUPTI_API_ENTER`
pub const SITE_ENTER: c_int = 0;
/// `CUPTI_API_EXIT`
pub const SITE_EXIT: c_int = 1;

/// `CUpti_CallbackFunc`: the user data, the domain, the number of the function, and [`CallbackData`]. The simulated
/// driver does not know the numbers and passes 0.
pub type CallbackFunction = unsafe extern "C" fn(*mut c_void, c_int, u32, *const CallbackData);

/// `CUpti_CallbackData`
#[derive(Debug)]
#[repr(C)]
pub struct CallbackData {
    /// Before the call or after it.
    pub site: c_int,
    /// The exact name of the exported symbol.
    pub function_name: *const c_char,
    /// Null: the simulated driver does not pass the arguments.
    pub function_params: *const c_void,
    /// The `CUresult`. Null before the call.
    pub function_return_value: *mut c_void,
    /// Null: only launches have one.
    pub symbol_name: *const c_char,
    /// Null: the context is not reported.
    pub context: *mut c_void,
    /// 0
    pub context_uid: u32,
    /// A number that the subscriber may keep from the first report of a call to the second.
    pub correlation_data: *mut u64,
    /// The number of the call.
    pub correlation_id: u32,
}
