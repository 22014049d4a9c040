//! Convolutions: the workspace that cuDNN requests.
//!
//! cuDNN's heuristics choose one of many algorithms, and each needs its own workspace: none, copies of tensors in
//! another layout, or partial sums of a filter's gradient. No rule in the documentation says which one is chosen.
//! 18,100 convolutions, each with its two backward passes, were measured: those of 21 models of torchvision and timm,
//! and random ones (`simulate/measurements/convolutions.py`). The workspace of a convolution is that of the most
//! similar measured one, adapted to its sizes. A measured one gets what was measured. A test leaves out one model after
//! another and states the error for the convolutions of the model that is left out.
//!
//! A framework that tries algorithms (`torch.backends.cudnn.benchmark`) allocates the largest workspace of those that
//! it tries. That was measured for 3,635 of the convolutions.

use super::element_bytes;
use std::sync::OnceLock;

/// The result that is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The output.
    Forward,
    /// The gradient of the input.
    BackwardData,
    /// The gradient of the filter.
    BackwardFilter,
}

/// The most spatial dimensions. Those that a convolution lacks have the size 1.
const DIMENSIONS: usize = 3;

/// Of one figure for each spatial dimension.
type Spatial = [u64; DIMENSIONS];

/// A convolution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// The result that is computed.
    pub operation: Operation,
    /// The data type of the tensors, `cudnnDataType_t`.
    pub data_type: i32,
    /// Whether the channels vary fastest in memory.
    pub channels_last: bool,
    /// The number of spatial dimensions, at least 2.
    pub dimensions: usize,
    /// The size of the batch.
    pub batch: u64,
    /// The channels of the input.
    pub input_channels: u64,
    /// The channels of the output.
    pub output_channels: u64,
    /// The number of groups.
    pub groups: u64,
    /// The spatial size of the input.
    pub input: Spatial,
    /// The spatial size of the output.
    pub output: Spatial,
    /// The spatial size of the filter.
    pub filter: Spatial,
    /// The step of the filter.
    pub stride: Spatial,
    /// The distance between elements of the filter.
    pub dilation: Spatial,
    /// Whether the input is padded.
    pub padded: bool,
}

/// A workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether this very convolution was measured.
    pub measured: bool,
    /// The smallest and the largest size in bytes that the [`SIMILAR`] most similar convolutions suggest. For nine of
    /// ten convolutions of a model that was left out, the measured workspace is in this range (to 2 % of the tensors).
    pub range: [u64; 2],
}

/// How many measured convolutions give the range of a workspace.
pub const SIMILAR: usize = 5;

/// The sizes of the tensors of a convolution in bytes.
#[derive(Clone, Copy)]
struct Tensors {
    input: u64,
    output: u64,
    filter: u64,
}

impl Tensors {
    /// The sets of tensors of which a workspace has copies, the largest first.
    fn sets(self) -> [u64; 7] {
        let Tensors { input, output, filter } = self;
        [input + output + filter, input + output, input + filter, output + filter, input, output, 0]
    }
}

impl Convolution {
    fn tensors(&self) -> Option<Tensors> {
        let bytes = element_bytes(self.data_type)?;
        let size = |channels: u64, spatial: Spatial| bytes * channels * spatial.iter().product::<u64>();
        Some(Tensors {
            input: size(self.batch * self.input_channels, self.input),
            output: size(self.batch * self.output_channels, self.output),
            filter: size(self.input_channels / self.groups.max(1) * self.output_channels, self.filter),
        })
    }

    /// The workspace of the algorithm that cuDNN's heuristics choose.
    pub fn workspace(&self) -> Workspace {
        estimate(self, Measured::chosen, measurements())
    }

    /// The largest workspace of the algorithms that PyTorch tries with `torch.backends.cudnn.benchmark`.
    pub fn benchmarked_workspace(&self) -> Workspace {
        estimate(self, Measured::benchmarked, measurements().iter().filter(|row| row.benchmarked_bytes.is_some()))
    }
}

/// The properties that distinguish algorithms, whatever the sizes. Only convolutions of one kind are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    operation: Operation,
    data_type: i32,
    channels_last: bool,
    dimensions: usize,
    /// 0 for one group, 1 for some, 2 for as many as the input has channels.
    grouping: u8,
}

/// The figures of a convolution by which it is compared with others of its kind.
struct Features {
    kind: Kind,
    /// Logarithms of sizes.
    sizes: [f32; 6],
    /// Properties on which the choice of an algorithm depends.
    properties: [u64; 7],
}

/// How much a doubling of each of [`Features::sizes`] counts.
const SIZE_WEIGHTS: [f32; 6] = [0.5, 1.0, 1.0, 0.7, 0.3, 1.0];
/// How much a difference in each of [`Features::properties`] counts.
const PROPERTY_WEIGHTS: [f32; 7] = [3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 2.0];

impl Features {
    fn of(convolution: &Convolution) -> Self {
        let c = convolution;
        let groups = c.groups.max(1);
        let (inputs, outputs) = (c.input_channels / groups, c.output_channels / groups);
        let volume = |spatial: Spatial| spatial.iter().product::<u64>();
        let logarithm = |n: u64| (n.max(1) as f32).log2();
        let largest = |spatial: Spatial| spatial.into_iter().max().unwrap_or(1);
        let (mut filter, used) = (c.filter, c.dimensions.min(DIMENSIONS));
        filter[..used].sort_unstable();
        let grouping = if groups == 1 { 0 } else { 1 + u8::from(groups == c.input_channels) };
        Features {
            kind: Kind {
                operation: c.operation,
                data_type: c.data_type,
                channels_last: c.channels_last,
                dimensions: c.dimensions,
                grouping,
            },
            sizes: [c.batch, inputs, outputs, volume(c.input), volume(c.output), groups].map(logarithm),
            properties: [
                filter.iter().fold(0, |all, size| all << 8 | size),
                largest(c.stride),
                largest(c.dilation),
                alignment(inputs),
                alignment(outputs),
                u64::from(c.padded),
                u64::from(filter[0] == 1),
            ],
        }
    }

    /// How different two convolutions of one kind are.
    fn distance(&self, other: &Features) -> f32 {
        let sizes = self.sizes.iter().zip(&other.sizes).zip(SIZE_WEIGHTS);
        let properties = self.properties.iter().zip(&other.properties).zip(PROPERTY_WEIGHTS);
        sizes.map(|((a, b), weight)| (a - b).abs() * weight).sum::<f32>()
            + properties.map(|((a, b), weight)| if a == b { 0.0 } else { weight }).sum::<f32>()
    }
}

/// The largest power of two up to 8 that divides a number of channels.
fn alignment(channels: u64) -> u64 {
    1 << channels.trailing_zeros().min(3)
}

/// A measured convolution.
struct Measured {
    convolution: Convolution,
    features: Features,
    bytes: u64,
    /// The bytes of the largest workspace of the algorithms that PyTorch tries, where that was measured.
    benchmarked_bytes: Option<u64>,
}

/// A workspace of a measured convolution: `None` as it was measured, else adapted to tensors of other sizes.
type WorkspaceOf = fn(&Measured, Option<Tensors>) -> u64;

/// The workspace of the most similar convolution, adapted to the sizes of this one. 0 if none is of its kind.
fn estimate<'a>(
    convolution: &Convolution,
    workspace_of: WorkspaceOf,
    measured: impl IntoIterator<Item = &'a Measured>,
) -> Workspace {
    let features = Features::of(convolution);
    let Some(tensors) = convolution.tensors() else { return Workspace::default() };
    let same_kind = measured.into_iter().filter(|other| other.features.kind == features.kind);
    let mut similar: Vec<_> = same_kind.map(|other| (features.distance(&other.features), other)).collect();
    if let Some((_, same)) =
        similar.iter().find(|(distance, other)| *distance == 0.0 && other.convolution == *convolution)
    {
        let bytes = workspace_of(same, None);
        return Workspace { bytes, measured: true, range: [bytes; 2] };
    }
    similar.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let suggested = || similar.iter().take(SIMILAR).map(|(_, other)| workspace_of(other, Some(tensors)));
    Workspace {
        bytes: suggested().next().unwrap_or(0),
        measured: false,
        range: [suggested().min().unwrap_or(0), suggested().max().unwrap_or(tensors.sets()[0])],
    }
}

/// Bytes that an algorithm takes for its own purposes, whatever the size of the tensors.
const SMALL: u64 = 3000;

impl Measured {
    /// The workspace of the algorithm that the heuristics choose.
    fn chosen(&self, tensors: Option<Tensors>) -> u64 {
        tensors.map_or(self.bytes, |tensors| self.adapted_to(tensors))
    }

    /// The largest workspace of the algorithms that PyTorch tries, in proportion to all tensors: the largest are those
    /// of Fourier transforms.
    fn benchmarked(&self, tensors: Option<Tensors>) -> u64 {
        let bytes = self.benchmarked_bytes.unwrap_or(0);
        let Some((new, own)) = tensors.zip(self.convolution.tensors()) else { return bytes };
        (bytes as f64 * new.sets()[0] as f64 / own.sets()[0].max(1) as f64) as u64
    }

    /// The workspace for tensors of other sizes: copies of the same tensors, and partial sums in proportion to the
    /// filter, or to all tensors if that is less.
    fn adapted_to(&self, tensors: Tensors) -> u64 {
        let Some(own) = self.convolution.tensors() else { return 0 };
        let (set, copies) = own
            .sets()
            .into_iter()
            .enumerate()
            .find(|(_, copies)| {
                // An alignment can make a copy a little smaller than the sum of the tensors.
                let rest = self.bytes as i64 - *copies as i64;
                rest >= -(*copies as i64 / 1000) && rest < partial_sums(*copies, own.filter) as i64
            })
            .unwrap_or((6, 0));
        let rest = self.bytes.saturating_sub(copies);
        let ratio = |new: u64, old: u64| new as f64 / old.max(1) as f64;
        let scale = ratio(tensors.filter, own.filter).min(ratio(tensors.sets()[0], own.sets()[0]));
        let scaled = (rest as f64 * scale) as u64;
        tensors.sets()[set] + if rest < SMALL { rest } else { scaled }
    }
}

/// The most bytes that a workspace has beyond copies of tensors, if it has such copies.
fn partial_sums(copies: u64, filter: u64) -> u64 {
    if copies == 0 { u64::MAX >> 1 } else { (copies * 35 / 100).max(12 * filter).max(1 << 16) }
}

/// All measured convolutions.
fn measurements() -> &'static [Measured] {
    static ALL: OnceLock<Vec<Measured>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut records = Records(include_bytes!(concat!(env!("OUT_DIR"), "/convolutions.bin")));
        std::iter::from_fn(|| records.next()).flatten().collect()
    })
}

/// Reads the records that `build.rs` made from the measurements.
struct Records(&'static [u8]);

impl Records {
    /// The next number, of so many bytes. `None` at the end.
    fn number(&mut self, bytes: usize) -> Option<u64> {
        let (first, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(first.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// A figure for each of some spatial dimensions, which are the last ones. Others get a 1 or a 0.
    fn spatial(&mut self, bytes: usize, dimensions: usize, missing: u64) -> Option<Spatial> {
        let mut spatial = [missing; DIMENSIONS];
        // A convolution over one dimension is one over two, of which the first has the size 1.
        let first = dimensions.max(2) - dimensions;
        for place in spatial.iter_mut().skip(first).take(dimensions) {
            *place = self.number(bytes)?;
        }
        Some(spatial)
    }

    /// The next measured convolution with its backward passes.
    fn next(&mut self) -> Option<[Measured; 3]> {
        let data_type = self.number(1)? as i32;
        let channels_last = self.number(1)? != 0;
        let transposed = self.number(1)? != 0;
        let dimensions = self.number(1)? as usize;
        let groups = self.number(2)?;
        let (batch, channels) = (self.number(2)?, self.number(2)?);
        let size = self.spatial(2, dimensions, 1)?;
        let (first, second) = (self.number(2)?, self.number(2)?);
        let filter = self.spatial(1, dimensions, 1)?;
        let stride = self.spatial(1, dimensions, 1)?;
        let padding = self.spatial(1, dimensions, 0)?;
        let dilation = self.spatial(1, dimensions, 1)?;
        let geometry = Geometry { filter, stride, padding, dilation };
        let other_channels = if transposed { second * groups } else { first };
        let other_size = if transposed { geometry.transposed(size) } else { geometry.output(size) };
        // A transposed convolution computes what the gradient of the input is for a convolution.
        let operations = if transposed {
            [Operation::BackwardData, Operation::Forward, Operation::BackwardFilter]
        } else {
            [Operation::Forward, Operation::BackwardData, Operation::BackwardFilter]
        };
        let swapped = |a, b| if transposed { (b, a) } else { (a, b) };
        let (input_channels, output_channels) = swapped(channels, other_channels);
        let [input, output] = if transposed { [other_size, size] } else { [size, other_size] };
        let mut workspaces = [0; 3];
        for bytes in &mut workspaces {
            *bytes = self.number(4)?;
        }
        let mut benchmarked = [None; 3];
        if self.number(1)? != 0 {
            for bytes in &mut benchmarked {
                *bytes = Some(self.number(5)?);
            }
        }
        let mut index = 0;
        Some(operations.map(|operation| {
            let convolution = Convolution {
                operation,
                data_type,
                channels_last,
                dimensions: dimensions.max(2),
                batch,
                input_channels,
                output_channels,
                groups,
                input,
                output,
                filter,
                stride,
                dilation,
                padded: padding != [0; DIMENSIONS],
            };
            let features = Features::of(&convolution);
            let (bytes, benchmarked_bytes) = (workspaces[index], benchmarked[index]);
            index += 1;
            Measured { features, convolution, bytes, benchmarked_bytes }
        }))
    }
}

/// How a filter moves over an input.
struct Geometry {
    filter: Spatial,
    stride: Spatial,
    padding: Spatial,
    dilation: Spatial,
}

impl Geometry {
    /// The extent of the filter in a dimension, less 1.
    fn reach(&self, n: usize) -> u64 {
        self.dilation[n] * (self.filter[n] - 1)
    }

    /// The spatial size of the output of a convolution.
    fn output(&self, input: Spatial) -> Spatial {
        std::array::from_fn(|n| (input[n] + 2 * self.padding[n] - self.reach(n) - 1) / self.stride[n] + 1)
    }

    /// The spatial size of the output of a transposed convolution.
    fn transposed(&self, input: Spatial) -> Spatial {
        std::array::from_fn(|n| (input[n] - 1) * self.stride[n] + self.reach(n) + 1 - 2 * self.padding[n])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::measurements;

    #[test]
    fn a_measured_convolution_gets_what_was_measured() {
        let all = super::measurements();
        assert!(all.len() > 50_000);
        for row in all.iter().step_by(37) {
            let found = row.convolution.workspace();
            assert!(found.measured, "{:?}", row.convolution);
            assert_eq!(found.bytes, row.bytes, "{:?}", row.convolution);
        }
    }

    /// The measured bytes, the estimate, and the bytes of all tensors, for every 41st convolution of models: its model
    /// is left out.
    fn estimated_without_the_own_model() -> Vec<(u64, Workspace, u64)> {
        let sources = measurements::rows("convolutions");
        let source = |index: usize| sources[index / 3]["source"].as_str().unwrap();
        let all = super::measurements();
        assert_eq!(all.len(), 3 * sources.len());
        let chosen = (0..all.len()).filter(|index| source(*index) != "random").step_by(41);
        let estimated = chosen.map(|index| {
            let others = all.iter().enumerate().filter(|(n, _)| source(*n) != source(index)).map(|(_, row)| row);
            let row = &all[index];
            (
                row.bytes,
                estimate(&row.convolution, Measured::chosen, others),
                row.convolution.tensors().unwrap().sets()[0],
            )
        });
        estimated.collect()
    }

    #[test]
    fn convolutions_of_a_model_that_was_not_measured_are_estimated() {
        let rows = estimated_without_the_own_model();
        let error =
            |(bytes, found, tensors): &(u64, Workspace, u64)| found.bytes.abs_diff(*bytes) as f64 / *tensors as f64;
        let mut errors: Vec<f64> = rows.iter().map(error).collect();
        errors.sort_by(f64::total_cmp);
        let share = |percent: usize| errors[errors.len() * percent / 100];
        assert!(errors.len() > 250, "{}", errors.len());
        // For three quarters of the convolutions, the error is below 3 % of their tensors, for nine tenths below 40 %.
        assert!(share(75) < 0.03, "{}", share(75));
        assert!(share(90) < 0.4, "{}", share(90));
        let within = |(bytes, found, tensors): &&(u64, Workspace, u64)| {
            let ([low, high], tolerance) = (found.range, tensors / 50);
            (low.saturating_sub(tolerance)..=high + tolerance).contains(bytes)
        };
        let inside = rows.iter().filter(within).count();
        assert!(inside * 10 >= rows.len() * 9, "{inside} of {} are in the range", rows.len());
    }

    #[test]
    fn the_largest_workspace_of_a_model_with_benchmarks_is_estimated() {
        let sources = measurements::rows("convolutions");
        let model =
            |index: usize| (sources[index / 3]["source"].as_str().unwrap(), sources[index / 3]["data_type"].as_str());
        let all = super::measurements();
        let benchmarked = || all.iter().enumerate().filter(|(_, row)| row.benchmarked_bytes.is_some());
        assert!(benchmarked().count() > 10_000);
        let mut largest: std::collections::BTreeMap<_, (u64, [u64; 2])> = Default::default();
        for (index, row) in benchmarked().filter(|(index, _)| model(*index).0 != "random").step_by(2) {
            let others = benchmarked().filter(|(n, _)| model(*n).0 != model(index).0).map(|(_, row)| row);
            let found = estimate(&row.convolution, Measured::benchmarked, others);
            let (bytes, range) = largest.entry(model(index)).or_default();
            *bytes = row.benchmarked_bytes.unwrap().max(*bytes);
            *range = [range[0].max(found.range[0]), range[1].max(found.range[1])];
        }
        let inside =
            largest.values().filter(|(bytes, [low, high])| (low - low / 50..=high + high / 50).contains(bytes));
        let inside = inside.count();
        assert!(largest.len() > 30, "{}", largest.len());
        assert!(inside * 10 >= largest.len() * 9, "{inside} of {}: {largest:?}", largest.len());
    }
}
