//! Recurrent layers and dropout: descriptors, the places of the weights, and the sizes of their spaces.

use super::tensor::Tensor;
use super::{INVALID, NOT_SUPPORTED};
use crate::support::{Handle, bridge, objects};
use simcuda::cudnn::element_bytes;
use simcuda::cudnn::recurrent::{Cell, Layers, Part, Sequences};
use simcuda::out::Out;
use std::ffi::{c_int, c_void};

/// The object to which a `cudnnDropoutDescriptor_t` points: the probability.
#[derive(Default)]
struct Dropout {
    probability: f32,
}

/// The object to which a `cudnnRNNDescriptor_t` points. `None` until it is set.
#[derive(Default)]
struct Descriptor {
    layers: Option<Layers>,
}

/// The object to which a `cudnnRNNDataDescriptor_t` points. `None` until it is set.
#[derive(Default)]
struct Data {
    sequences: Option<Sequences>,
}

objects! {
    cudnnCreateDropoutDescriptor / cudnnDestroyDropoutDescriptor: Dropout;
    cudnnCreateRNNDescriptor / cudnnDestroyRNNDescriptor: Descriptor;
    cudnnCreateRNNDataDescriptor / cudnnDestroyRNNDataDescriptor: Data;
}

/// The state of the random number generator of one thread in bytes: measured, 6,488,064 bytes for 132 multiprocessors
/// of 2,048 threads.
const STATE_BYTES: usize = 24;

#[unsafe(no_mangle)]
extern "C" fn cudnnDropoutGetStatesSize(_handle: *const Handle, size: Out<usize>) -> c_int {
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
    const MULTIPROCESSORS: c_int = 16;
    /// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`
    const THREADS: c_int = 39;
    let threads = bridge().map_or(0, |bridge| (bridge.attribute)(MULTIPROCESSORS) * (bridge.attribute)(THREADS));
    size.put(threads as usize * STATE_BYTES);
    0
}

fn set_dropout(dropout: Option<&mut Dropout>, probability: f32) -> c_int {
    let Some(dropout) = dropout else { return INVALID };
    dropout.probability = probability;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetDropoutDescriptor(
    dropout: Option<&mut Dropout>,
    _handle: *const Handle,
    probability: f32,
    _states: *const c_void,
    _size: usize,
    _seed: u64,
) -> c_int {
    set_dropout(dropout, probability)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnRestoreDropoutDescriptor(
    dropout: Option<&mut Dropout>,
    _handle: *const Handle,
    probability: f32,
    _states: *const c_void,
    _size: usize,
    _seed: u64,
) -> c_int {
    set_dropout(dropout, probability)
}

/// `cudnnRNNMode_t`
fn cell(mode: c_int) -> Option<Cell> {
    match mode {
        0 | 1 => Some(Cell::Simple),
        2 => Some(Cell::Lstm),
        3 => Some(Cell::Gru),
        _ => None,
    }
}

/// A size that a program passes.
fn size(value: c_int) -> Option<u64> {
    u64::try_from(value).ok()
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
extern "C" fn cudnnSetRNNDescriptor_v8(
    descriptor: Option<&mut Descriptor>,
    algorithm: c_int,
    mode: c_int,
    _bias_mode: c_int,
    direction: c_int,
    _input_mode: c_int,
    data_type: c_int,
    _precision: c_int,
    _math_type: c_int,
    input: c_int,
    hidden: c_int,
    projection: c_int,
    layers: c_int,
    dropout: Option<&Dropout>,
    _flags: u32,
) -> c_int {
    let Some(descriptor) = descriptor else { return INVALID };
    let (Some(cell), Some(layers), Some(input), Some(hidden), Some(element_bytes)) =
        (cell(mode), size(layers), size(input), size(hidden), element_bytes(data_type))
    else {
        return NOT_SUPPORTED;
    };
    descriptor.layers = Some(Layers {
        cell,
        persistent: algorithm != 0,
        layers,
        directions: if direction == 0 { 1 } else { 2 },
        input,
        hidden,
        projection: size(projection).filter(|projection| *projection != hidden),
        dropout: dropout.is_some_and(|dropout| dropout.probability > 0.0),
        data_type,
        element_bytes,
    });
    0
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cudnnSetRNNDataDescriptor(
    data: Option<&mut Data>,
    _data_type: c_int,
    layout: c_int,
    longest: c_int,
    number: c_int,
    _vector: c_int,
    lengths: *const c_int,
    _padding: *const c_void,
) -> c_int {
    /// `CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED`
    const PACKED: c_int = 1;
    let (Some(data), Some(number), Some(longest)) = (data, size(number), size(longest)) else { return INVALID };
    if lengths.is_null() {
        return INVALID;
    }
    // SAFETY: by the contract of cuDNN there is a length for each sequence, and the array is not null.
    let lengths = unsafe { std::slice::from_raw_parts(lengths, number as usize) };
    let packed = layout == PACKED;
    let steps = if packed { lengths.iter().filter_map(|length| size(*length)).sum() } else { number * longest };
    data.sequences = Some(Sequences { number, longest, steps, packed });
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightSpaceSize(
    _handle: *const Handle,
    descriptor: Option<&Descriptor>,
    size: Out<usize>,
) -> c_int {
    let Some(layers) = descriptor.and_then(|descriptor| descriptor.layers) else { return INVALID };
    size.put(layers.weights() as usize);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNTempSpaceSizes(
    _handle: *const Handle,
    descriptor: Option<&Descriptor>,
    mode: c_int,
    data: Option<&Data>,
    workspace: Out<usize>,
    reserve: Out<usize>,
) -> c_int {
    let layers = descriptor.and_then(|descriptor| descriptor.layers);
    let sequences = data.and_then(|data| data.sequences);
    let (Some(layers), Some(sequences)) = (layers, sequences) else { return INVALID };
    // `CUDNN_FWD_MODE_TRAINING` is 1.
    let training = mode == 1;
    workspace.put(layers.workspace(&sequences, training) as usize);
    reserve.put(if training { layers.reserve(&sequences) as usize } else { 0 });
    0
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
extern "C" fn cudnnGetRNNWeightParams(
    _handle: *const Handle,
    descriptor: Option<&Descriptor>,
    pseudo_layer: c_int,
    _size: usize,
    weights: u64,
    number: c_int,
    matrix: Option<&mut Tensor>,
    matrix_address: Out<u64>,
    bias: Option<&mut Tensor>,
    bias_address: Out<u64>,
) -> c_int {
    let layers = descriptor.and_then(|descriptor| descriptor.layers);
    let (Some(layers), Some(layer), Some(number)) = (layers, size(pseudo_layer), size(number)) else {
        return INVALID;
    };
    let put = |part: Option<Part>, tensor: Option<&mut Tensor>, address: Out<u64>| {
        address.put(part.map_or(0, |part| weights + part.offset * layers.element_bytes));
        if let (Some(part), Some(tensor)) = (part, tensor) {
            *tensor = Tensor::contiguous(layers.data_type, &[1, part.rows as c_int, part.columns as c_int]);
        }
    };
    put(layers.matrix(layer, number), matrix, matrix_address);
    put(layers.bias(layer, number), bias, bias_address);
    0
}
