//! PyTorch's classes of tensors, and descriptions of tensors.

use std::ffi::CStr;
use std::fmt::Write as _;

use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, type_name, type_of};

/// The objects of PyTorch that are used. Their references are never released.
pub(super) struct TorchClasses {
    /// `torch.Tensor`.
    pub(super) tensor: PyObjectPtr,
    parameter: PyObjectPtr,
}

/// The description of a tensor.
pub(super) struct TensorDescription {
    /// For example `Tensor float32[1024, 1024]`.
    pub(super) text: String,
    /// Where its storage begins, 0 if unknown.
    pub(super) address: u64,
    /// The size of its storage in bytes, 0 if unknown.
    pub(super) bytes: u64,
}

impl TorchClasses {
    /// Finds PyTorch's objects. The error says what is missing.
    pub(super) fn find(gil: GilToken<'_>) -> Result<TorchClasses, String> {
        let missing = "torch has no class Tensor or torch.nn has no class Parameter";
        let torch = gil.import(c"torch")?;
        let tensor = gil.attribute(torch.object, c"Tensor").ok_or(missing)?;
        let nn = gil.import(c"torch.nn")?;
        let parameter = gil.attribute(nn.object, c"Parameter").ok_or(missing)?;
        Ok(TorchClasses { tensor: tensor.into_raw(), parameter: parameter.into_raw() })
    }

    /// Describes a tensor. `None` for any other object.
    pub(super) fn describe_tensor(&self, gil: GilToken<'_>, object: PyObjectPtr) -> Option<TensorDescription> {
        if !gil.is_instance(object, self.tensor) {
            return None;
        }
        // SAFETY: callers pass a live object.
        let class = unsafe { type_of(object) };
        // SAFETY: `class` is the type of a live object, so it is alive too.
        let mut tensor = TensorDescription { text: unsafe { type_name(class) }.to_owned(), address: 0, bytes: 0 };
        if class != self.tensor && class != self.parameter {
            // A subclass may compute these attributes with the program's own code.
            return Some(tensor);
        }
        if let (Some(dtype), Some(shape)) = (gil.attribute(object, c"dtype"), gil.attribute(object, c"shape")) {
            let dtype = gil.text_of(dtype.object).unwrap_or_default();
            let sizes = gil.elements(shape.object).map(|size| gil.as_int(size).to_string());
            let sizes: Vec<String> = sizes.collect();
            let _ = write!(tensor.text, " {}[{}]", dtype.trim_start_matches("torch."), sizes.join(", "));
        }
        let storage = gil.attribute(object, c"untyped_storage").and_then(|get| gil.call(get.object, &[]));
        if let Some(storage) = storage {
            let number = |name: &CStr| {
                let get = gil.attribute(storage.object, name)?;
                gil.call(get.object, &[]).map(|number| gil.as_address(number.object))
            };
            (tensor.address, tensor.bytes) =
                (number(c"data_ptr").unwrap_or_default(), number(c"nbytes").unwrap_or_default());
        }
        Some(tensor)
    }
}
