//! The backend (graph) interface: descriptors whose attributes a program sets, and that refer to each other.
//!
//! Only convolutions are known. A descriptor that is made from others is about the same convolution as they are: an
//! operation, the graph of the operation, the heuristics for the graph, an engine configuration, and at the end a plan.
//! The heuristics offer a configuration of each [`Algorithm`], without notes or knobs. Every other number that a
//! program requests is 0.

use super::algorithm::{ALGORITHMS, Algorithm};
use super::{INVALID, Requests, estimates, requests};
use crate::support::{CUDNN_ALLOC_FAILED, Handle, launch, load};
use simcuda::cudnn::convolution::{Convolution, Operation};
use simcuda::library_memory::Kernels;
use simcuda::out::Out;
use std::ffi::{c_int, c_void};
use std::slice;

/// `cudnnBackendAttributeName_t`
mod name {
    pub(super) const CONVOLUTION_DILATIONS: i32 = 102;
    pub(super) const CONVOLUTION_FILTER_STRIDES: i32 = 103;
    pub(super) const CONVOLUTION_PRE_PADDINGS: i32 = 105;
    pub(super) const ENGINEHEUR_RESULTS: i32 = 202;
    pub(super) const ENGINECFG_KNOB_CHOICES: i32 = 302;
    pub(super) const EXECUTION_PLAN_WORKSPACE_SIZE: i32 = 402;
    pub(super) const OPERATION_CONVOLUTION_FORWARD: [i32; 4] = [702, 704, 705, 703];
    pub(super) const OPERATION_CONVOLUTION_BWD_DATA: [i32; 4] = [708, 710, 711, 709];
    pub(super) const OPERATION_CONVOLUTION_BWD_FILTER: [i32; 4] = [714, 716, 717, 715];
    pub(super) const OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: i32 = 802;
    pub(super) const TENSOR_DATA_TYPE: i32 = 901;
    pub(super) const TENSOR_DIMENSIONS: i32 = 902;
    pub(super) const TENSOR_STRIDES: i32 = 903;
    pub(super) const ENGINE_KNOB_INFO: i32 = 1302;
    pub(super) const ENGINE_NUMERICAL_NOTE: i32 = 1303;
    pub(super) const ENGINE_BEHAVIOR_NOTE: i32 = 1305;
}

/// `cudnnBackendAttributeType_t`
mod kind {
    pub(super) const HANDLE: i32 = 0;
    pub(super) const DATA_TYPE: i32 = 1;
    pub(super) const BOOLEAN: i32 = 2;
    pub(super) const INT64: i32 = 3;
    pub(super) const DOUBLE: i32 = 5;
    pub(super) const VOID_PTR: i32 = 6;
    pub(super) const BACKEND_DESCRIPTOR: i32 = 15;
    pub(super) const CHAR: i32 = 24;
}

/// The shape of a tensor.
#[derive(Clone, Default)]
struct Shape {
    /// `cudnnDataType_t`
    data_type: c_int,
    /// Batch, channels, then the spatial dimensions. Of a filter: outputs, inputs of a group, then the spatial
    /// dimensions.
    dimensions: Vec<i64>,
    strides: Vec<i64>,
}

impl Shape {
    /// Whether the channels vary fastest in memory. `None` if the shape does not show it.
    fn channels_last(&self) -> Option<bool> {
        let channels = *self.dimensions.get(1)?;
        let is_plain = channels == 1 || self.dimensions.iter().skip(2).all(|size| *size == 1);
        if is_plain { None } else { Some(*self.strides.get(1)? == 1) }
    }
}

/// How a filter moves over an input, for each spatial dimension.
#[derive(Clone, Default)]
struct Movement {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    paddings: Vec<i64>,
}

/// The object to which a `cudnnBackendDescriptor_t` points.
#[derive(Default)]
struct Descriptor {
    /// Of a tensor.
    shape: Shape,
    /// Of a convolution that is no operation yet.
    movement: Movement,
    /// Of an operation: how the filter moves, the input, the output, and the filter.
    operands: (Option<Operation>, Movement, [Shape; 3]),
    /// The convolution that the descriptor is about. Not known before an operation is finalized.
    convolution: Option<Convolution>,
    /// Of a configuration or a plan.
    algorithm: Algorithm,
}

/// The spatial figures of a list, with one for each missing dimension.
fn spatial(list: &[i64], missing: u64) -> [u64; 3] {
    std::array::from_fn(|n| list.get(n).map_or(missing, |size| *size as u64))
}

impl Descriptor {
    /// The convolution that an operation computes. `None` if attributes are missing.
    fn operation(&self) -> Option<Convolution> {
        let (operation, movement, shapes) = &self.operands;
        let [input, output, filter] = shapes;
        let size = |shape: &Shape, n: usize| shape.dimensions.get(n).map(|size| *size as u64);
        let of_group = size(filter, 1)?.max(1);
        Some(Convolution {
            operation: (*operation)?,
            data_type: input.data_type,
            channels_last: shapes.iter().find_map(Shape::channels_last).unwrap_or(false),
            dimensions: input.dimensions.len().checked_sub(2)?,
            batch: size(input, 0)?,
            input_channels: size(input, 1)?,
            output_channels: size(output, 1)?,
            groups: size(input, 1)? / of_group,
            input: spatial(input.dimensions.get(2..)?, 1),
            output: spatial(output.dimensions.get(2..)?, 1),
            filter: spatial(filter.dimensions.get(2..)?, 1),
            stride: spatial(&movement.strides, 1),
            dilation: spatial(&movement.dilations, 1),
            padded: movement.paddings.iter().any(|padding| *padding != 0),
        })
    }

    /// The bytes that a plan requests.
    fn workspace(&self) -> u64 {
        match (&self.convolution, requests()) {
            (None, _) => 0,
            (_, Requests::Fixed(bytes)) => bytes,
            (Some(_), _) if self.algorithm == Algorithm::Frugal => 0,
            (Some(convolution), requests) => {
                let workspace = match self.algorithm {
                    Algorithm::Tried => convolution.benchmarked_workspace(),
                    _ => convolution.workspace(),
                };
                estimates::note(convolution, self.algorithm, &workspace);
                let [smallest, largest] = workspace.range;
                match requests {
                    Requests::Smallest => smallest,
                    Requests::Largest => largest,
                    _ => workspace.bytes,
                }
            }
        }
    }

    /// Stores a descriptor under an attribute's name.
    fn refer(&mut self, attribute: c_int, other: &Descriptor) {
        let operations = [
            (Operation::Forward, name::OPERATION_CONVOLUTION_FORWARD),
            (Operation::BackwardData, name::OPERATION_CONVOLUTION_BWD_DATA),
            (Operation::BackwardFilter, name::OPERATION_CONVOLUTION_BWD_FILTER),
        ];
        for (operation, names) in operations {
            match names.iter().position(|name| *name == attribute) {
                Some(0) => (self.operands.0, self.operands.1) = (Some(operation), other.movement.clone()),
                Some(n) => self.operands.2[n - 1] = other.shape.clone(),
                None => {}
            }
        }
        if other.convolution.is_some() {
            self.convolution.clone_from(&other.convolution);
            self.algorithm = other.algorithm;
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendCreateDescriptor(_kind: c_int, out: Out<Box<Descriptor>>) -> c_int {
    out.put(Box::default());
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendDestroyDescriptor(_descriptor: Option<Box<Descriptor>>) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendFinalize(descriptor: Option<&mut Descriptor>) -> c_int {
    let Some(descriptor) = descriptor else { return INVALID };
    if let Some(convolution) = descriptor.operation() {
        descriptor.convolution = Some(convolution);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendExecute(handle: Option<&Handle>, plan: Option<&Descriptor>, _pack: *const c_void) -> c_int {
    // PyTorch makes plans for convolutions and attention.
    let kernels = match plan.and_then(|plan| plan.convolution.as_ref()).map(|convolution| convolution.operation) {
        Some(Operation::Forward) => Kernels::CudnnForward,
        Some(Operation::BackwardData | Operation::BackwardFilter) => Kernels::CudnnBackward,
        None => Kernels::CudnnAttention,
    };
    if !load(kernels) {
        return CUDNN_ALLOC_FAILED;
    }
    for _ in 0..plan.map_or(1, |plan| plan.algorithm.launches()) {
        launch(handle.map_or(0, |h| h.stream));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendSetAttribute(
    descriptor: Option<&mut Descriptor>,
    attribute: c_int,
    type_: c_int,
    count: i64,
    elements: *const c_void,
) -> c_int {
    let (Some(descriptor), Ok(count)) = (descriptor, usize::try_from(count)) else { return INVALID };
    if elements.is_null() {
        return if count == 0 { 0 } else { INVALID };
    }
    match type_ {
        kind::INT64 => {
            let place = match attribute {
                name::TENSOR_DIMENSIONS => &mut descriptor.shape.dimensions,
                name::TENSOR_STRIDES => &mut descriptor.shape.strides,
                name::CONVOLUTION_FILTER_STRIDES => &mut descriptor.movement.strides,
                name::CONVOLUTION_DILATIONS => &mut descriptor.movement.dilations,
                name::CONVOLUTION_PRE_PADDINGS => &mut descriptor.movement.paddings,
                _ => return 0,
            };
            // SAFETY: by the contract of cuDNN the array has `count` numbers of this type, and it is not null.
            *place = unsafe { slice::from_raw_parts(elements.cast::<i64>(), count) }.to_vec();
        }
        kind::DATA_TYPE if attribute == name::TENSOR_DATA_TYPE && count > 0 => {
            // SAFETY: by the contract of cuDNN the array has `count` numbers of this type, and it is not null.
            descriptor.shape.data_type = unsafe { *elements.cast::<c_int>() };
        }
        kind::BACKEND_DESCRIPTOR => {
            // SAFETY: by the contract of cuDNN the array has `count` descriptors, and it is not null. They are null or
            // objects of this module, and none of them is `descriptor`.
            let others = unsafe { slice::from_raw_parts(elements.cast::<Option<&Descriptor>>(), count) };
            others.iter().flatten().for_each(|other| descriptor.refer(attribute, other));
        }
        _ => {}
    }
    0
}

/// Tells descriptors of the caller what they are about: those that another one gives out. Returns their number, or how
/// many there are if none is requested. A program takes the number for that of the descriptors that are filled in.
///
/// # Safety
/// `out` is null or valid for `requested` descriptors, which are null or objects of this module other than
/// `descriptor`.
unsafe fn give_out(descriptor: &Descriptor, attribute: c_int, requested: i64, out: Out<u8>) -> i64 {
    let algorithms = if attribute == name::ENGINEHEUR_RESULTS { &ALGORITHMS[..] } else { &ALGORITHMS[..1] };
    let available = algorithms.len() as i64;
    for (n, algorithm) in algorithms.iter().enumerate().take(requested.max(0) as usize) {
        let place: Out<*mut Descriptor> = out.cast().nth(n);
        // SAFETY: the caller guarantees that each is null or an object of this module that nobody else borrows.
        if let Some(other) = place.get().and_then(|other| unsafe { other.as_mut() }) {
            other.convolution.clone_from(&descriptor.convolution);
            other.algorithm = *algorithm;
        }
    }
    if requested > 0 { available.min(requested) } else { available }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendGetAttribute(
    descriptor: Option<&Descriptor>,
    attribute: c_int,
    type_: c_int,
    requested: i64,
    count: Out<i64>,
    out: Out<u8>,
) -> c_int {
    let Some(descriptor) = descriptor else { return INVALID };
    let room = !out.is_null() && requested > 0;
    let number = match attribute {
        name::EXECUTION_PLAN_WORKSPACE_SIZE => descriptor.workspace() as i64,
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
        // SAFETY: by the contract of cuDNN the array has `requested` descriptors that the caller created for this.
        (_, kind::BACKEND_DESCRIPTOR) => unsafe { give_out(descriptor, attribute, requested, out) },
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
