//! Finds a tensor's memory by reading the tensor's own fields. No Python code runs, and no lazy copy is materialized.
//!
//! The layouts are private to PyTorch, so each is checked at run time:
//! - *`THPVariable`*, a tensor's Python object, points to its `c10::TensorImpl`. That object must have exactly the
//!   vtable that libc10 exports for the class, and it must point back to the Python object.
//! - *`TensorImpl`* points to its `c10::StorageImpl` at offset 16. The type info of that object's vtable must have
//!   exactly this name, because several libraries have such a vtable.
//! - *`StorageImpl`* holds a `c10::DataPtr` (data, deleter, context, device) and the size. For one tensor, data and
//!   size must equal the results of `aoti_torch_get_data_ptr` and `aoti_torch_get_storage_size`. libtorch exports both
//!   as a stable interface. The tensor must have memory that PyTorch itself owns and that is no lazy copy.
//! - *The sizes* must be at the address that `aoti_torch_get_sizes` returns.
//!
//! Tensors of other implementations (sparse, nested, quantized, functional) are skipped.

use std::ffi::{CStr, c_void};
use std::fmt::Write;

use memtrace_stackwalk::CheckedMemory;

use crate::cpython::api::PyObjectPtr;
use crate::linker::mapped_object::containing;
use crate::linker::shared_objects::exported_by;

/// Values of `c10::DeviceType`.
const CPU: u8 = 0;
const CUDA: u8 = 1;

/// Possible offsets of the `TensorImpl` pointer in `THPVariable`, with and without a preceding flag of
/// `c10::MaybeOwned`. In bytes.
const IMPL_OFFSETS: [usize; 2] = [24, 16];
/// Offset of the storage pointer in `TensorImpl`, in bytes.
const STORAGE_OFFSET: usize = 16;
/// Offset of the pointer to `AutogradMeta` in `TensorImpl`, in bytes.
const AUTOGRAD_META_OFFSET: usize = 24;
/// Offset of `grad_` in `AutogradMeta`, in bytes: after its vtable and a string. Strings are smaller in PyTorch's
/// packages before 2.7, which are built with the older C++ ABI.
const GRADIENT_OFFSETS: [usize; 2] = [40, 16];
/// The range of addresses that objects of the program may have.
const ADDRESSES: std::ops::Range<usize> = memtrace_stackwalk::arch::USER_ADDRESSES;
/// Possible offsets of the `DataPtr` in `StorageImpl`, after vtable and reference counts. In bytes.
const DATA_OFFSETS: [usize; 2] = [16, 24];
/// Offsets of the deleter and the device within `DataPtr`, and of the storage's size behind it. In bytes from the
/// `DataPtr`.
const DELETER: usize = 8;
const DEVICE: usize = 24;
const SIZE: usize = 32;
/// How many 8-byte words of a `TensorImpl` are searched. It has about 200 bytes.
const IMPL_WORDS: usize = 22;
/// `c10::impl::SizesAndStrides` stores up to this many dimensions inline.
const INLINE_DIMENSIONS: u64 = 5;
/// A tensor with more dimensions is taken for an unknown layout.
const MAX_DIMENSIONS: u64 = 64;

/// The name of `c10::StorageImpl` in its C++ type info.
const STORAGE_NAME: &[u8; 20] = b"N3c1011StorageImplE\0";

type TensorGetter<T> = unsafe extern "C" fn(*const *mut c_void, *mut T) -> i32;
/// `const at::Tensor& c10::TensorImpl::grad() const`.
type GradGetter = unsafe extern "C-unwind" fn(*mut c_void) -> *const *mut c_void;

/// Symbols of PyTorch's libraries.
pub(super) struct TorchSymbols {
    /// The base class of `torch.Tensor`, as exported by libtorch_python.
    pub(super) tensor_class: PyObjectPtr,
    tensor_vtable: u64,
    storage_vtable: u64,
    cow_deleter: u64,
    grad: GradGetter,
    data: TensorGetter<u64>,
    storage_size: TensorGetter<i64>,
    storage_offset: TensorGetter<i64>,
    dimensions: TensorGetter<i64>,
    sizes: TensorGetter<*const i64>,
    dtype: TensorGetter<i32>,
}

/// The verified offsets, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TensorLayout {
    implementation: usize,
    python: usize,
    data: usize,
    sizes: usize,
}

/// A tensor's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TensorMemory {
    /// Where the tensor's storage begins in memory.
    pub(super) address: u64,
    pub(super) implementation: *mut c_void,
}

/// The memory of a tensor, if it has any that is recorded.
pub(super) enum TensorStorage {
    Memory(TensorMemory),
    /// No memory of its own: the tensor wraps others.
    Wrapper(*mut c_void),
    /// Memory on another kind of device, or a tensor of an implementation that is skipped.
    NotRecorded,
}

/// # Safety
///
/// `object + offset` points to 8 readable, aligned bytes.
unsafe fn word(object: *mut c_void, offset: usize) -> u64 {
    // SAFETY: the caller guarantees 8 readable, aligned bytes.
    unsafe { object.byte_add(offset).cast::<u64>().read() }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

impl TorchSymbols {
    /// Finds the symbols. The error is the reason why tensor names are not available.
    pub(super) fn find() -> Result<TorchSymbols, &'static str> {
        let find = |library: &[u8], name: &CStr| {
            let found = exported_by(library, name);
            (!found.is_null()).then_some(found)
        };
        let shim = |name: &CStr| {
            find(b"libtorch_cpu.so", name)
                .ok_or("libtorch_cpu does not export the functions that verify tensor layouts")
        };
        let vtable = |name: &CStr| {
            let found = find(b"libc10.so", name).ok_or("libc10 exports no vtables of tensors and storages")?;
            // The address point of a vtable follows the offset to top and the type info, 8 bytes each (Itanium C++
            // ABI).
            Ok::<u64, &'static str>(found.addr() as u64 + 16)
        };
        let class =
            find(b"libtorch_python.so", c"THPVariableClass").ok_or("libtorch_python exports no tensor class")?;
        let grad =
            find(b"libc10.so", c"_ZNK3c1010TensorImpl4gradEv").ok_or("libc10 does not export TensorImpl::grad")?;
        // SAFETY: `THPVariableClass` is a `PyObject*`. The functions have these signatures in c10/core/TensorImpl.h and
        // torch/csrc/inductor/aoti_torch/c/shim.h. There, a handle is a pointer to an `at::Tensor`, which is a pointer
        // to its implementation.
        unsafe {
            let class = class.cast::<PyObjectPtr>().read();
            if class.is_null() {
                return Err("PyTorch is not initialized yet");
            }
            Ok(TorchSymbols {
                tensor_class: class,
                tensor_vtable: vtable(c"_ZTVN3c1010TensorImplE")?,
                storage_vtable: vtable(c"_ZTVN3c1011StorageImplE")?,
                cow_deleter: exported_by(b"libc10.so", c"_ZN3c104impl3cow11cow_deleterEPv").addr() as u64,
                grad: std::mem::transmute::<*mut c_void, GradGetter>(grad),
                data: std::mem::transmute::<*mut c_void, TensorGetter<u64>>(shim(c"aoti_torch_get_data_ptr")?),
                storage_size: std::mem::transmute::<*mut c_void, TensorGetter<i64>>(shim(
                    c"aoti_torch_get_storage_size",
                )?),
                storage_offset: std::mem::transmute::<*mut c_void, TensorGetter<i64>>(shim(
                    c"aoti_torch_get_storage_offset",
                )?),
                dimensions: std::mem::transmute::<*mut c_void, TensorGetter<i64>>(shim(c"aoti_torch_get_dim")?),
                sizes: std::mem::transmute::<*mut c_void, TensorGetter<*const i64>>(shim(c"aoti_torch_get_sizes")?),
                dtype: std::mem::transmute::<*mut c_void, TensorGetter<i32>>(shim(c"aoti_torch_get_dtype")?),
            })
        }
    }

    /// Determines the layout from one tensor and verifies it. `Ok(None)` if this tensor is not suitable, `Err` with the
    /// reason if the layout is not as expected.
    ///
    /// # Safety
    ///
    /// `tensor` is a live Python tensor, and the calling thread holds the GIL.
    pub(super) unsafe fn verify_layout(&self, tensor: PyObjectPtr) -> Result<Option<TensorLayout>, &'static str> {
        let Ok(memory) = CheckedMemory::open() else { return Ok(None) };
        let read = |address: u64, offset: usize| memory.size(address as usize, offset).map(|word| word as u64);
        let impl_at = |offset: &usize| {
            read(tensor.addr() as u64, *offset).filter(|at| *at != 0 && read(*at, 0) == Some(self.tensor_vtable))
        };
        let Some((implementation, at)) = IMPL_OFFSETS.iter().find_map(|offset| Some((*offset, impl_at(offset)?)))
        else {
            return Ok(None);
        };
        let points_back = |index: &usize| read(at, index * 8).is_some_and(|word| word & !1 == tensor.addr() as u64);
        let python = (3..IMPL_WORDS)
            .find(points_back)
            .map(|index| index * 8)
            .ok_or("a tensor does not point to its Python object")?;
        let Some(storage) = read(at, STORAGE_OFFSET).filter(|at| self.is_storage_at(*at, &memory)) else {
            return Ok(None);
        };
        let handle = pointer(at);
        let handle = &raw const handle;
        // SAFETY: `handle` refers to a live tensor whose implementation has the vtable of `TensorImpl`. These functions
        // only read.
        let (offset, dimensions) = unsafe { (query(self.storage_offset, handle), query(self.dimensions, handle)) };
        if offset != Some(0) || !dimensions.is_some_and(|n| (1..=INLINE_DIMENSIONS as i64).contains(&n)) {
            return Ok(None);
        }
        // Accepts only PyTorch's CPU and CUDA devices, and a deleter in PyTorch's own libraries other than that of
        // copy-on-write storage. Then reading the data pointer has no side effect.
        let is_plain_storage = |at: &&usize| {
            let device = read(storage, **at + DEVICE).unwrap_or(u64::MAX).to_le_bytes()[0];
            let deleter = read(storage, **at + DELETER).unwrap_or(0);
            let own = containing(deleter as usize).is_some_and(|o| is_torch(o.file_name()));
            (device == CPU || device == CUDA) && own && deleter != self.cow_deleter
        };
        let Some(data_at) = DATA_OFFSETS.iter().find(is_plain_storage) else { return Ok(None) };
        // SAFETY: `handle` refers to a live, plain tensor. `aoti_torch_get_data_ptr` materializes a lazy copy, and
        // `is_plain_storage` has excluded those.
        let (data, size) = unsafe { (query(self.data, handle), query(self.storage_size, handle)) };
        let (Some(data), Some(size)) = (data, size) else { return Ok(None) };
        if data == 0 || size == 0 {
            return Ok(None);
        }
        if read(storage, *data_at) != Some(data) || read(storage, data_at + SIZE) != Some(size as u64) {
            return Err("a storage is not at the address that PyTorch reports");
        }
        // SAFETY: `handle` refers to a live, plain tensor, and this function only reads. The sizes of so few dimensions
        // are inside the tensor.
        let sizes = unsafe { query(self.sizes, handle) }.map_or(0, |at| at.addr() as u64);
        let sizes = sizes.wrapping_sub(at) as usize;
        if sizes >= IMPL_WORDS * 8 || read(at, sizes.wrapping_sub(8)) != dimensions.map(|n| n as u64) {
            return Err("a tensor's sizes are not inside the tensor");
        }
        Ok(Some(TensorLayout { implementation, python, data: *data_at, sizes }))
    }

    /// Classifies the memory of a Python tensor. CPU memory counts only if `cpu` is set.
    ///
    /// # Safety
    ///
    /// `tensor` is a live instance of the tensor class, and the calling thread holds the GIL.
    pub(super) unsafe fn storage_of(&self, layout: &TensorLayout, tensor: PyObjectPtr, cpu: bool) -> TensorStorage {
        // SAFETY: the caller guarantees a live `THPVariable`, which has this word. `verify_layout` has verified the
        // other offsets for plain implementations.
        unsafe {
            let implementation = pointer(word(tensor, layout.implementation));
            if !self.is_plain(implementation) || word(implementation, layout.python) & !1 != tensor.addr() as u64 {
                return TensorStorage::NotRecorded;
            }
            self.memory(layout, implementation, cpu)
        }
    }

    /// Whether this is a `TensorImpl` itself, not an object of a derived class.
    ///
    /// # Safety
    ///
    /// `implementation` is null or points to a live C++ object with virtual functions.
    unsafe fn is_plain(&self, implementation: *mut c_void) -> bool {
        // SAFETY: the caller guarantees such an object. It begins with its vtable pointer.
        !implementation.is_null() && unsafe { word(implementation, 0) } == self.tensor_vtable
    }

    /// Whether this is the vtable of `StorageImpl`.
    ///
    /// # Safety
    ///
    /// `vtable` is the address of a C++ vtable.
    unsafe fn is_storage(&self, vtable: u64) -> bool {
        // SAFETY: the caller guarantees a vtable. The word before its first function points to the type info, whose
        // second word points to the name (Itanium C++ ABI 2.9).
        vtable == self.storage_vtable
            || unsafe {
                let type_info = word(pointer(vtable).wrapping_byte_sub(8), 0);
                type_info != 0
                    && CStr::from_ptr(pointer(word(pointer(type_info), 8)).cast()).to_bytes_with_nul() == STORAGE_NAME
            }
    }

    /// # Safety
    ///
    /// `implementation` is a live, plain `TensorImpl`.
    unsafe fn memory(&self, layout: &TensorLayout, implementation: *mut c_void, cpu: bool) -> TensorStorage {
        // SAFETY: the caller guarantees a live, plain implementation. Its storage pointer is null or points to a live
        // object. A `StorageImpl` has these words, as `verify_layout` has verified.
        unsafe {
            let storage = pointer(word(implementation, STORAGE_OFFSET));
            if storage.is_null() {
                return TensorStorage::Wrapper(implementation);
            }
            if !self.is_storage(word(storage, 0)) {
                return TensorStorage::NotRecorded;
            }
            let address = word(storage, layout.data);
            if address == 0 {
                return TensorStorage::Wrapper(implementation);
            }
            match word(storage, layout.data + DEVICE).to_le_bytes() {
                [CUDA, ..] => TensorStorage::Memory(TensorMemory { address, implementation }),
                [CPU, ..] if cpu => TensorStorage::Memory(TensorMemory { address, implementation }),
                _ => TensorStorage::NotRecorded,
            }
        }
    }

    /// The memory of a tensor's gradient, and the gradient's Python object or null. `None` if there is no plain
    /// gradient.
    ///
    /// # Safety
    ///
    /// `of` is a live, plain implementation, and no thread changes its gradient meanwhile.
    pub(super) unsafe fn gradient(
        &self,
        layout: &TensorLayout,
        of: *mut c_void,
        cpu: bool,
    ) -> Option<(TensorStorage, PyObjectPtr)> {
        // SAFETY: the caller guarantees a live implementation for this member function. It returns a reference to a
        // tensor that may be undefined.
        unsafe {
            let gradient = (self.grad)(of);
            if gradient.is_null() || !self.is_plain(*gradient) {
                return None;
            }
            let python = pointer(word(*gradient, layout.python) & !1);
            Some((self.memory(layout, *gradient, cpu), python))
        }
    }

    /// The address of a tensor's `grad_fn`, an autograd node. `None` if it has none, or if it is not where PyTorch
    /// should have it: after `grad_`, whose address `TensorImpl::grad()` returns.
    ///
    /// # Safety
    ///
    /// `of` is a live, plain implementation.
    pub(super) unsafe fn gradient_function(&self, of: *mut c_void) -> Option<usize> {
        // SAFETY: the caller guarantees a live implementation for this member function, and `grad_fn_` is in
        // `AutogradMeta` if `grad_` is.
        unsafe {
            let meta = word(of, AUTOGRAD_META_OFFSET) as usize;
            let gradient = (self.grad)(of).addr();
            let offset = GRADIENT_OFFSETS.into_iter().find(|offset| meta.wrapping_add(*offset) == gradient)?;
            let node = || word(pointer(meta as u64), offset + 8) as usize;
            (meta != 0).then(node).filter(|node| *node != 0)
        }
    }

    /// Where the storage of the tensor begins whose implementation is at this address. `None` if there is no plain
    /// tensor with memory that is recorded.
    pub(super) fn memory_at(
        &self,
        layout: &TensorLayout,
        implementation: usize,
        memory: &CheckedMemory,
        cpu: bool,
    ) -> Option<u64> {
        // Most words are no addresses.
        if !ADDRESSES.contains(&implementation) || !implementation.is_multiple_of(8) {
            return None;
        }
        // A freed tensor may still have its vtable, so every read is checked.
        let read = |address: u64, offset: usize| memory.size(address as usize, offset).map(|word| word as u64);
        let implementation = implementation as u64;
        read(implementation, 0).filter(|vtable| *vtable == self.tensor_vtable)?;
        let storage = read(implementation, STORAGE_OFFSET).filter(|at| self.is_storage_at(*at, memory))?;
        let address = read(storage, layout.data).filter(|address| *address != 0)?;
        let [device, ..] = read(storage, layout.data + DEVICE)?.to_le_bytes();
        (device == CUDA || device == CPU && cpu).then_some(address)
    }

    /// Whether a `StorageImpl` is at this address, which may be any.
    fn is_storage_at(&self, storage: u64, memory: &CheckedMemory) -> bool {
        let read = |address: u64, offset: usize| memory.size(address as usize, offset).map(|word| word as u64);
        let Some(vtable) = read(storage, 0) else { return false };
        let name = || read(read(vtable.wrapping_sub(8), 0)?, 8);
        let mut text = [0; STORAGE_NAME.len()];
        let named = |name: u64| memory.read(name as usize, &mut text) && text == *STORAGE_NAME;
        vtable == self.storage_vtable || name().is_some_and(named)
    }

    /// The size of the first dimension of a tensor. `None` for tensors of other implementations.
    ///
    /// # Safety
    ///
    /// `tensor` is a live instance of the tensor class, and the calling thread holds the GIL.
    pub(super) unsafe fn length(&self, layout: &TensorLayout, tensor: PyObjectPtr) -> Option<u64> {
        // SAFETY: the caller guarantees a live `THPVariable`, which has this word. `verify_layout` has verified the
        // other offsets for plain implementations: the number of dimensions, followed by up to five sizes.
        unsafe {
            let of = pointer(word(tensor, layout.implementation));
            let is_plain = self.is_plain(of) && word(of, layout.python) & !1 == tensor.addr() as u64;
            let is_inline = is_plain && (1..=INLINE_DIMENSIONS).contains(&word(of, layout.sizes - 8));
            is_inline.then(|| word(of, layout.sizes))
        }
    }

    /// Data type and sizes, for example `float32[64, 3, 7, 7]`. Empty if the number of dimensions is implausible.
    ///
    /// # Safety
    ///
    /// `implementation` is a live, plain `TensorImpl`.
    pub(super) unsafe fn shape(&self, layout: &TensorLayout, implementation: *mut c_void) -> String {
        // SAFETY: `verify_layout` has verified this offset: the number of dimensions, followed by the sizes or by a
        // pointer to them. The caller guarantees that the tensor is alive.
        let (dtype, sizes) = unsafe {
            let dimensions = word(implementation, layout.sizes - 8);
            if dimensions > MAX_DIMENSIONS {
                return String::new();
            }
            let inside = implementation.byte_add(layout.sizes).cast::<i64>();
            let sizes = if dimensions <= INLINE_DIMENSIONS { inside } else { inside.cast::<*mut i64>().read() };
            let sizes: &[i64] =
                if sizes.is_null() { &[] } else { std::slice::from_raw_parts(sizes, dimensions as usize) };
            (query(self.dtype, &raw const implementation).unwrap_or(-1), sizes)
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
///
/// `getter` only reads from the tensor, and `handle` refers to a live tensor.
unsafe fn query<T>(getter: TensorGetter<T>, handle: *const *mut c_void) -> Option<T> {
    let mut value = std::mem::MaybeUninit::uninit();
    // SAFETY: the caller guarantees the function and the handle. The result 0 means that the function has written
    // `value`.
    unsafe { (getter(handle, value.as_mut_ptr()) == 0).then(|| value.assume_init()) }
}

fn is_torch(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libc10") || file_name.starts_with(b"libtorch")
}

/// Names of `c10::ScalarType` by number (torch/headeronly/core/ScalarType.h). PyTorch never reuses a number.
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
