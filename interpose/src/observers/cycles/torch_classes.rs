//! PyTorch's classes and functions that describe tensors and draw reference cycles.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::cpython::api::{self, METH_O, MethodDef, PyObjectPtr};
use crate::cpython::calls::new_none;
use crate::cpython::gil::{GilToken, PyOwned, type_name, type_of};

/// The largest size of a picture in bytes.
const MAX_PICTURE_BYTES: usize = 2 << 20;

/// The objects of PyTorch that are used. Their references are never released.
pub(super) struct TorchClasses {
    /// `torch.Tensor`.
    pub(super) tensor: PyObjectPtr,
    parameter: PyObjectPtr,
    pub(super) pictures: Option<PictureFunctions>,
}

/// The functions of `torch.utils.viz._cycles`, and ours that they call.
pub(super) struct PictureFunctions {
    create_graph: PyObjectPtr,
    to_html: PyObjectPtr,
    is_tensor: PyObjectPtr,
    describe: PyObjectPtr,
}

static IS_TENSOR: MethodDef = MethodDef {
    name: c"is_tensor".as_ptr(),
    body: is_tensor,
    flags: METH_O,
    doc: c"Whether an object is a tensor.".as_ptr(),
};
static DESCRIBE: MethodDef =
    MethodDef { name: c"describe".as_ptr(), body: describe, flags: METH_O, doc: c"Describes a tensor.".as_ptr() };

/// `create_graph` calls this with the GIL: whether an object is a tensor.
unsafe extern "C" fn is_tensor(_: PyObjectPtr, object: PyObjectPtr) -> PyObjectPtr {
    with_torch(|gil, torch| Some(gil.new_bool(gil.is_instance(object, torch.tensor))))
}

/// `create_graph` calls this with the GIL: data type, shape and address of a tensor. `None` for other objects.
unsafe extern "C" fn describe(_: PyObjectPtr, object: PyObjectPtr) -> PyObjectPtr {
    with_torch(|gil, torch| {
        let tensor = torch.describe_tensor(gil, object)?;
        let mut text = tensor.text;
        if tensor.address != 0 {
            let _ = write!(text, "\n{} bytes at {:#x}", tensor.bytes, tensor.address);
        }
        gil.new_str(&text).map(PyOwned::into_raw)
    })
}

fn with_torch(of: impl FnOnce(GilToken<'_>, &TorchClasses) -> Option<PyObjectPtr>) -> PyObjectPtr {
    let Some(api) = api::found() else { return std::ptr::null_mut() };
    // SAFETY: the interpreter calls its functions with the GIL.
    let gil = unsafe { GilToken::new(api) };
    let answer = found_classes().zip(gil).and_then(|(torch, gil)| of(gil, torch));
    // SAFETY: the interpreter calls its functions with the GIL.
    answer.unwrap_or_else(|| unsafe { new_none(api) })
}

/// PyTorch's objects, if they were found. They belong to the loaded library and are inherited by forked children.
static TORCH: AtomicPtr<TorchClasses> = AtomicPtr::new(null_mut());

fn found_classes() -> Option<&'static TorchClasses> {
    // SAFETY: the pointer is null or comes from a box that `TorchClasses::find` has leaked.
    unsafe { TORCH.load(Ordering::Acquire).as_ref() }
}

/// The description of a tensor.
pub(super) struct TensorDescription {
    /// For example `Tensor float32[1024, 1024]`.
    pub(super) text: String,
    /// Where its storage begins, 0 if unknown.
    pub(super) address: u64,
    /// The size of its storage in bytes, 0 if unknown.
    bytes: u64,
}

impl TorchClasses {
    /// Finds PyTorch's objects. The second result is the reason why there are no pictures, if there are none.
    pub(super) fn find(gil: GilToken<'_>) -> Result<(&'static TorchClasses, Option<String>), String> {
        let missing = "torch has no class Tensor or torch.nn has no class Parameter";
        let torch = gil.import(c"torch")?;
        let tensor = gil.attribute(torch.object, c"Tensor").ok_or(missing)?;
        let nn = gil.import(c"torch.nn")?;
        let parameter = gil.attribute(nn.object, c"Parameter").ok_or(missing)?;
        let (pictures, no_pictures_reason) = match PictureFunctions::new(gil) {
            Ok(pictures) => (Some(pictures), None),
            Err(reason) => (None, Some(reason)),
        };
        let found = TorchClasses { tensor: tensor.into_raw(), parameter: parameter.into_raw(), pictures };
        let found = Box::into_raw(Box::new(found));
        TORCH.store(found, Ordering::Release);
        // SAFETY: the box was just made, and it is never freed.
        Ok((unsafe { &*found }, no_pictures_reason))
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
        let storage = gil.attribute(object, c"untyped_storage").and_then(|get| gil.call(get.object, &[], &[]));
        if let Some(storage) = storage {
            let number = |name: &CStr| {
                let get = gil.attribute(storage.object, name)?;
                gil.call(get.object, &[], &[]).map(|number| gil.as_address(number.object))
            };
            (tensor.address, tensor.bytes) =
                (number(c"data_ptr").unwrap_or_default(), number(c"nbytes").unwrap_or_default());
        }
        Some(tensor)
    }
}

impl PictureFunctions {
    fn new(gil: GilToken<'_>) -> Result<PictureFunctions, String> {
        let cycles = gil.import(c"torch.utils.viz._cycles")?;
        let get = |name: &CStr| {
            gil.attribute(cycles.object, name).ok_or("its functions differ from those that memtrace supports")
        };
        let function = |method| gil.new_function(method).ok_or("the interpreter is out of memory");
        let (create_graph, to_html) = (get(c"create_graph")?, get(c"to_html")?);
        let (is_tensor, describe) = (function(&IS_TENSOR)?, function(&DESCRIBE)?);
        let [create_graph, to_html, is_tensor, describe] =
            [create_graph, to_html, is_tensor, describe].map(PyOwned::into_raw);
        Ok(PictureFunctions { create_graph, to_html, is_tensor, describe })
    }

    /// The HTML page that shows these objects. `None` if PyTorch's code fails or the page is too large.
    pub(super) fn html<'a>(
        &self,
        gil: GilToken<'a>,
        objects: impl Iterator<Item = PyObjectPtr>,
    ) -> Option<PyOwned<'a>> {
        let list = gil.new_list()?;
        let objects: Vec<PyObjectPtr> = objects.filter(|object| !gil.is_proxy(*object)).collect();
        let mut seen: HashSet<usize> = objects.iter().map(|object| object.addr()).collect();
        for object in objects {
            gil.list_append(list.object, object);
            // `create_graph` reads an object's dictionary, which may create it. From then on the dictionary holds the
            // attributes, so the picture needs it as an object of its own.
            let attributes = gil.is_plain_instance(object).then(|| gil.attribute_dict(object)).flatten();
            if let Some(dict) =
                attributes.filter(|dict| gil.has_entries(dict.object) && seen.insert(dict.object.addr()))
            {
                gil.list_append(list.object, dict.object);
            }
        }
        let keywords = [(c"context", self.describe), (c"filter", self.is_tensor)];
        let nodes = gil.call(self.create_graph, &[list.object], &keywords)?;
        let html = gil.call(self.to_html, &[nodes.object], &[])?;
        gil.str(html.object).filter(|text| text.len() <= MAX_PICTURE_BYTES)?;
        Some(html)
    }
}
