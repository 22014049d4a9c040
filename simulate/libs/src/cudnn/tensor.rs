//! Descriptors of tensors.

use super::INVALID;
use crate::support::objects;
use simcuda::out::Out;
use std::ffi::c_int;

/// The object to which a `cudnnTensorDescriptor_t` points.
#[derive(Default)]
pub(super) struct Tensor {
    /// `cudnnDataType_t`
    pub(super) data_type: c_int,
    pub(super) dimensions: Vec<c_int>,
    pub(super) strides: Vec<c_int>,
}

objects! {
    cudnnCreateTensorDescriptor / cudnnDestroyTensorDescriptor: Tensor;
}

impl Tensor {
    /// A contiguous tensor.
    pub(super) fn contiguous(data_type: c_int, dimensions: &[c_int]) -> Self {
        let mut strides = vec![1; dimensions.len()];
        for n in (1..dimensions.len()).rev() {
            strides[n - 1] = strides[n] * dimensions[n];
        }
        Tensor { data_type, dimensions: dimensions.to_vec(), strides }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetTensorNdDescriptor(
    tensor: Option<&mut Tensor>,
    data_type: c_int,
    number: c_int,
    dimensions: *const c_int,
    strides: *const c_int,
) -> c_int {
    let (Some(tensor), Ok(number)) = (tensor, usize::try_from(number)) else { return INVALID };
    if dimensions.is_null() || strides.is_null() {
        return INVALID;
    }
    // SAFETY: by the contract of cuDNN both arrays have `number` elements, and they are not null.
    let list = |array| unsafe { std::slice::from_raw_parts(array, number) }.to_vec();
    *tensor = Tensor { data_type, dimensions: list(dimensions), strides: list(strides) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: Option<&Tensor>,
    requested: c_int,
    data_type: Out<c_int>,
    number: Out<c_int>,
    dimensions: Out<c_int>,
    strides: Out<c_int>,
) -> c_int {
    let Some(tensor) = tensor else { return INVALID };
    data_type.put(tensor.data_type);
    number.put(tensor.dimensions.len() as c_int);
    let requested = usize::try_from(requested).unwrap_or(0);
    for (n, (dimension, stride)) in tensor.dimensions.iter().zip(&tensor.strides).enumerate().take(requested) {
        dimensions.nth(n).put(*dimension);
        strides.nth(n).put(*stride);
    }
    0
}
