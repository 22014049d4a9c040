//! Where a tensor's memory is, read from the tensor itself: no Python code runs, nothing is materialised.
//!
//! What is private here, and what it is checked against:
//! - *`THPVariable`* (a tensor's Python object) points to its `c10::TensorImpl`: an object with exactly the vtable that libc10 exports for
//!   that class, which points back to the Python object;
//! - *`TensorImpl`* points to its `c10::StorageImpl`, 16 bytes in: an object whose vtable's type info has exactly that name (several libraries
//!   have such a vtable);
//! - *`StorageImpl`* holds `c10::DataPtr` (data, deleter, context, device) and the size: the data and the size must be what
//!   `aoti_torch_get_data_ptr` and `aoti_torch_get_storage_size` (functions that libtorch exports with a promise to keep them) answer for
//!   the same tensor, asked once of one whose memory is PyTorch's own and cannot be lazily copied;
//! - *the sizes* lie where `aoti_torch_get_sizes` says.
//!
//! Tensors of other implementations (sparse, nested, quantized, functional) are left alone.

use std::ffi::{CStr, c_void};
use std::fmt::Write;

use super::python::Object;
use crate::hooks::exported_by;
use crate::objects;
use crate::stack::CheckedMemory;

/// `c10::DeviceType`.
const CPU: u8 = 0;
const CUDA: u8 = 1;

/// Where `THPVariable` has its `TensorImpl`: behind a flag of `c10::MaybeOwned`, or not.
const IMPL_AT: [usize; 2] = [24, 16];
/// Where `TensorImpl` has its storage.
const STORAGE_AT: usize = 16;
/// Where `StorageImpl` has its `DataPtr`: behind vtable and reference counts.
const DATA_AT: [usize; 2] = [16, 24];
/// Within `DataPtr`, and behind it.
const DELETER: usize = 8;
const DEVICE: usize = 24;
const SIZE: usize = 32;
/// How far into a `TensorImpl` is looked: it is about 200 bytes.
const IMPL_WORDS: usize = 22;
/// `c10::impl::SizesAndStrides` holds so many dimensions itself.
const INLINE_DIMENSIONS: u64 = 5;
/// More dimensions are not believed.
const MOST_DIMENSIONS: u64 = 64;

/// The name of `c10::StorageImpl` in its type info.
const STORAGE_NAME: &[u8; 20] = b"N3c1011StorageImplE\0";

type Question<T> = unsafe extern "C" fn(*const *mut c_void, *mut T) -> i32;

/// What is found in PyTorch's libraries.
pub(super) struct Torch {
    /// `torch.Tensor`'s base class, as libtorch_python has it.
    pub(super) tensor_class: Object,
    tensor_vtable: u64,
    storage_vtable: u64,
    cow_deleter: u64,
    /// `const at::Tensor& c10::TensorImpl::grad() const`.
    grad: unsafe extern "C-unwind" fn(*mut c_void) -> *const *mut c_void,
    data: Question<u64>,
    storage_size: Question<i64>,
    storage_offset: Question<i64>,
    dimensions: Question<i64>,
    sizes: Question<*const i64>,
    dtype: Question<i32>,
}

/// Offsets that were verified.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    implementation: usize,
    python: usize,
    data: usize,
    sizes: usize,
}

/// A tensor's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Memory {
    /// Where its storage begins.
    pub(super) address: u64,
    pub(super) implementation: *mut c_void,
}

/// What is behind a tensor.
pub(super) enum Behind {
    Memory(Memory),
    /// No memory of its own: a tensor that wraps others.
    Nothing(*mut c_void),
    /// Memory elsewhere, or a tensor of an implementation that is left alone.
    Elsewhere,
}

/// # Safety
/// There are 8 bytes.
unsafe fn word(object: *mut c_void, offset: usize) -> u64 {
    // SAFETY: as promised.
    unsafe { object.byte_add(offset).cast::<u64>().read() }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

impl Torch {
    /// `Err` names what is missing.
    pub(super) fn find() -> Result<Torch, &'static str> {
        let find = |library: &[u8], name: &CStr| {
            let found = exported_by(library, name);
            (!found.is_null()).then_some(found)
        };
        let shim = |name: &CStr| {
            find(b"libtorch_cpu.so", name).ok_or("libtorch_cpu does not export the functions to check it with")
        };
        let vtable = |name: &CStr| {
            let found = find(b"libc10.so", name).ok_or("libc10 exports no vtables of tensors and storages")?;
            // Behind the offset to the top and the type info.
            Ok::<u64, &'static str>(found.addr() as u64 + 16)
        };
        let class =
            find(b"libtorch_python.so", c"THPVariableClass").ok_or("libtorch_python exports no class of tensors")?;
        let grad =
            find(b"libc10.so", c"_ZNK3c1010TensorImpl4gradEv").ok_or("libc10 does not export TensorImpl::grad")?;
        // SAFETY: `PyObject* THPVariableClass`; functions of these signatures (c10/core/TensorImpl.h,
        // torch/csrc/inductor/aoti_torch/c/shim.h): a handle is a pointer to an `at::Tensor`, which is a pointer to its implementation.
        unsafe {
            let class = class.cast::<Object>().read();
            if class.is_null() {
                return Err("PyTorch is not ready");
            }
            Ok(Torch {
                tensor_class: class,
                tensor_vtable: vtable(c"_ZTVN3c1010TensorImplE")?,
                storage_vtable: vtable(c"_ZTVN3c1011StorageImplE")?,
                cow_deleter: exported_by(b"libc10.so", c"_ZN3c104impl3cow11cow_deleterEPv").addr() as u64,
                grad: std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn(*mut c_void) -> *const *mut c_void>(
                    grad,
                ),
                data: std::mem::transmute::<*mut c_void, Question<u64>>(shim(c"aoti_torch_get_data_ptr")?),
                storage_size: std::mem::transmute::<*mut c_void, Question<i64>>(shim(c"aoti_torch_get_storage_size")?),
                storage_offset: std::mem::transmute::<*mut c_void, Question<i64>>(shim(
                    c"aoti_torch_get_storage_offset",
                )?),
                dimensions: std::mem::transmute::<*mut c_void, Question<i64>>(shim(c"aoti_torch_get_dim")?),
                sizes: std::mem::transmute::<*mut c_void, Question<*const i64>>(shim(c"aoti_torch_get_sizes")?),
                dtype: std::mem::transmute::<*mut c_void, Question<i32>>(shim(c"aoti_torch_get_dtype")?),
            })
        }
    }

    /// Works out the layout from one tensor and checks it. `Ok(None)`: this tensor is not one to tell by.
    ///
    /// # Safety
    /// `tensor` is a live Python tensor; this thread holds the GIL.
    pub(super) unsafe fn calibrate(&self, tensor: Object) -> Result<Option<Layout>, &'static str> {
        let Ok(memory) = CheckedMemory::open() else { return Ok(None) };
        let read = |address: u64, offset: usize| memory.size(address as usize, offset).map(|word| word as u64);
        let is_ours = |offset: &usize| {
            read(tensor.addr() as u64, *offset).filter(|at| *at != 0 && read(*at, 0) == Some(self.tensor_vtable))
        };
        let Some((implementation, at)) = IMPL_AT.iter().find_map(|offset| Some((*offset, is_ours(offset)?))) else {
            return Ok(None);
        };
        let back = |index: &usize| read(at, index * 8).is_some_and(|word| word & !1 == tensor.addr() as u64);
        let python =
            (3..IMPL_WORDS).find(back).map(|index| index * 8).ok_or("a tensor does not point to its Python object")?;
        let is_storage = |storage: &u64| {
            let vtable = read(*storage, 0)?;
            let name = || read(read(vtable.wrapping_sub(8), 0)?, 8);
            let mut text = [0; STORAGE_NAME.len()];
            let named = |name: u64| memory.read(name as usize, &mut text) && text == *STORAGE_NAME;
            Some(vtable == self.storage_vtable || name().is_some_and(named))
        };
        let Some(storage) = read(at, STORAGE_AT).filter(|at| is_storage(at) == Some(true)) else {
            return Ok(None);
        };
        let handle = pointer(at);
        let handle = &raw const handle;
        // SAFETY: the handle of a live, plain tensor; these questions only read.
        let (offset, dimensions) = unsafe { (ask(self.storage_offset, handle), ask(self.dimensions, handle)) };
        if offset != Some(0) || !dimensions.is_some_and(|n| (1..=INLINE_DIMENSIONS as i64).contains(&n)) {
            return Ok(None);
        }
        // A device of PyTorch's, and memory whose deleter is one of PyTorch's own that copies nothing: to ask where it is changes nothing.
        let plain = |at: &&usize| {
            let device = read(storage, **at + DEVICE).unwrap_or(u64::MAX).to_le_bytes()[0];
            let deleter = read(storage, **at + DELETER).unwrap_or(0);
            let own = objects::containing(deleter as usize).is_some_and(|o| is_torch(o.file_name()));
            (device == CPU || device == CUDA) && own && deleter != self.cow_deleter
        };
        let Some(data_at) = DATA_AT.iter().find(plain) else { return Ok(None) };
        // SAFETY: as above; this one materialises a lazy copy, which this is not.
        let (data, size) = unsafe { (ask(self.data, handle), ask(self.storage_size, handle)) };
        let (Some(data), Some(size)) = (data, size) else { return Ok(None) };
        if data == 0 || size == 0 {
            return Ok(None);
        }
        if read(storage, *data_at) != Some(data) || read(storage, data_at + SIZE) != Some(size as u64) {
            return Err("a storage does not lie where PyTorch says its memory is");
        }
        // SAFETY: as above: where the sizes are, which for so few dimensions is in the tensor itself.
        let sizes = unsafe { ask(self.sizes, handle) }.map_or(0, |at| at.addr() as u64);
        let sizes = sizes.wrapping_sub(at) as usize;
        if sizes >= IMPL_WORDS * 8 || read(at, sizes.wrapping_sub(8)) != dimensions.map(|n| n as u64) {
            return Err("a tensor's sizes do not lie in it");
        }
        Ok(Some(Layout { implementation, python, data: *data_at, sizes }))
    }

    /// What is behind a tensor's Python object.
    ///
    /// # Safety
    /// `tensor` is a live instance of the class of tensors; this thread holds the GIL.
    pub(super) unsafe fn behind(&self, layout: &Layout, tensor: Object, cpu: bool) -> Behind {
        // SAFETY: a `THPVariable` has this word; what a plain implementation has was verified.
        unsafe {
            let implementation = pointer(word(tensor, layout.implementation));
            if !self.is_plain(implementation) || word(implementation, layout.python) & !1 != tensor.addr() as u64 {
                return Behind::Elsewhere;
            }
            self.memory(layout, implementation, cpu)
        }
    }

    /// Whether it is a `TensorImpl` and nothing derived from it.
    ///
    /// # Safety
    /// Null, or a live object with virtual functions.
    unsafe fn is_plain(&self, implementation: *mut c_void) -> bool {
        // SAFETY: such an object begins with its vtable pointer.
        !implementation.is_null() && unsafe { word(implementation, 0) } == self.tensor_vtable
    }

    /// Whether it is the vtable of `StorageImpl`.
    ///
    /// # Safety
    /// It is one.
    unsafe fn is_storage(&self, vtable: u64) -> bool {
        // SAFETY: the word before the first function is the type info, whose second word is the name (Itanium C++ ABI 2.9).
        vtable == self.storage_vtable
            || unsafe {
                let type_info = word(pointer(vtable).wrapping_byte_sub(8), 0);
                type_info != 0
                    && CStr::from_ptr(pointer(word(pointer(type_info), 8)).cast()).to_bytes_with_nul() == STORAGE_NAME
            }
    }

    /// # Safety
    /// A live, plain implementation.
    unsafe fn memory(&self, layout: &Layout, implementation: *mut c_void, cpu: bool) -> Behind {
        // SAFETY: as promised: it holds a storage or none; a live `StorageImpl` has these words.
        unsafe {
            let storage = pointer(word(implementation, STORAGE_AT));
            if storage.is_null() {
                return Behind::Nothing(implementation);
            }
            if !self.is_storage(word(storage, 0)) {
                return Behind::Elsewhere;
            }
            let address = word(storage, layout.data);
            if address == 0 {
                return Behind::Nothing(implementation);
            }
            match word(storage, layout.data + DEVICE).to_le_bytes() {
                [CUDA, ..] => Behind::Memory(Memory { address, implementation }),
                [CPU, ..] if cpu => Behind::Memory(Memory { address, implementation }),
                _ => Behind::Elsewhere,
            }
        }
    }

    /// What is behind the gradient of a tensor, and its Python object, where it has one.
    ///
    /// # Safety
    /// A live, plain implementation, whose gradient nobody changes meanwhile.
    pub(super) unsafe fn gradient(&self, layout: &Layout, of: *mut c_void, cpu: bool) -> Option<(Behind, Object)> {
        // SAFETY: the function's own object; its answer is a reference to a tensor that may be undefined.
        unsafe {
            let gradient = (self.grad)(of);
            if gradient.is_null() || !self.is_plain(*gradient) {
                return None;
            }
            let python = pointer(word(*gradient, layout.python) & !1);
            Some((self.memory(layout, *gradient, cpu), python))
        }
    }

    /// Data type and sizes, e.g. `float32[64, 3, 7, 7]`.
    ///
    /// # Safety
    /// A live, plain implementation.
    pub(super) unsafe fn shape(&self, layout: &Layout, implementation: *mut c_void) -> String {
        // SAFETY: verified: the number of dimensions, and behind it the sizes or where they are.
        let (dtype, sizes) = unsafe {
            let dimensions = word(implementation, layout.sizes - 8);
            if dimensions > MOST_DIMENSIONS {
                return String::new();
            }
            let inside = implementation.byte_add(layout.sizes).cast::<i64>();
            let sizes = if dimensions <= INLINE_DIMENSIONS { inside } else { inside.cast::<*mut i64>().read() };
            let sizes: &[i64] =
                if sizes.is_null() { &[] } else { std::slice::from_raw_parts(sizes, dimensions as usize) };
            (ask(self.dtype, &raw const implementation).unwrap_or(-1), sizes)
        };
        let mut text = String::from(usize::try_from(dtype).ok().and_then(|d| DTYPES.get(d)).copied().unwrap_or(""));
        text.push('[');
        for (index, size) in sizes.iter().enumerate() {
            let _ = write!(text, "{}{size}", if index == 0 { "" } else { ", " });
        }
        text.push(']');
        text
    }
}

/// # Safety
/// The question is only read from, and the handle is of a live tensor.
unsafe fn ask<T>(question: Question<T>, handle: *const *mut c_void) -> Option<T> {
    let mut answer = std::mem::MaybeUninit::uninit();
    // SAFETY: as promised; an answer of 0 says that the place was written.
    unsafe { (question(handle, answer.as_mut_ptr()) == 0).then(|| answer.assume_init()) }
}

fn is_torch(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libc10") || file_name.starts_with(b"libtorch")
}

/// `c10::ScalarType`, by number (torch/headeronly/core/ScalarType.h): numbers are never reused.
const DTYPES: [&str; 46] = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "uint16",
    "uint32",
    "uint64",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
];
