//! The content of a device's memory at one point in time.

use memtrace_analysis::report::{AllocationGroup, MemoryState};
use schemars::JsonSchema;
use serde::Serialize;

use super::place::SourceLocation;
use crate::mcp::answer::{Shape, Size, percent};

/// Part of the allocated memory.
#[derive(Serialize, JsonSchema, Debug)]
#[schemars(rename = "Part")]
pub(super) struct MemoryShare {
    /// The category, phase or module.
    name: String,
    /// Its size.
    size: Size,
    /// Its share of the allocated bytes.
    share: String,
    /// The number of blocks, or of modules.
    count: u64,
}

/// Blocks with one call stack, category and phase.
#[derive(Serialize, JsonSchema, Debug)]
pub(super) struct Allocation {
    /// Their size.
    size: Size,
    /// Their share of the allocated bytes.
    share: String,
    /// The number of blocks.
    blocks: u64,
    /// The category.
    category: String,
    /// The phase that allocated them.
    phase: String,
    /// The name of the largest tensor, or the pattern of all names.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor: Option<String>,
    /// The data type and shape of the tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<String>,
    #[serde(flatten)]
    place: SourceLocation,
}

/// The memory of a device at one point in time.
#[derive(Serialize, JsonSchema, Debug)]
pub(super) struct Held {
    /// The step, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
    /// The phase.
    phase: String,
    /// Blocks in use: `torch.cuda.memory_allocated`.
    allocated: Size,
    /// Memory that PyTorch's caching allocator holds from CUDA: `torch.cuda.memory_reserved`.
    reserved: Size,
    /// The bytes that the program requested for these blocks, without rounding.
    requested: Size,
    /// Blocks in use, and freed blocks that streams still use. Absent if it equals `allocated`.
    #[serde(skip_serializing_if = "Option::is_none")]
    active: Option<Size>,
    /// The allocated blocks by category.
    by_category: Vec<MemoryShare>,
    /// The allocated blocks by the phase that allocated them.
    by_phase: Vec<MemoryShare>,
    /// The allocated blocks by `nn.Module`. Only for the peak, if calls of modules were recorded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    by_module: Vec<MemoryShare>,
    /// The largest allocations.
    largest: Vec<Allocation>,
}

impl Held {
    /// A memory state, with this number of frames of each stack.
    pub(super) fn of(state: &MemoryState, frames: usize, shape: &Shape) -> Held {
        let all = state.totals.allocated_bytes;
        let part = |name: String, bytes: u64, count: u64| MemoryShare {
            name: shape.text(&name),
            size: Size::of(bytes),
            share: percent(bytes, all),
            count,
        };
        Held {
            step: state.step,
            phase: state.phase.name().to_owned(),
            allocated: Size::of(all),
            reserved: Size::of(state.totals.reserved_bytes),
            requested: Size::of(state.totals.requested_bytes),
            active: (state.totals.active_bytes != all).then(|| Size::of(state.totals.active_bytes)),
            by_category: shape.first("by_category", &largest_first(&state.by_category, |c| c.bytes), |c| {
                part(c.category.name().to_owned(), c.bytes, c.blocks)
            }),
            by_phase: shape.first("by_phase", &largest_first(&state.by_phase, |p| p.bytes), |p| {
                part(p.phase.name().to_owned(), p.bytes, p.blocks)
            }),
            by_module: shape.first("by_module", &state.module_groups, |group| {
                let class = group.class.as_ref().map(|class| format!(" ({class})")).unwrap_or_default();
                part(format!("{}{class}", group.pattern), group.bytes, group.modules as u64)
            }),
            largest: shape.page("largest", &state.largest_allocations, |group| allocation(group, all, frames, shape)),
        }
    }
}

/// Rows by size in descending order.
pub(super) fn largest_first<T>(rows: &[T], bytes: impl Fn(&T) -> u64) -> Vec<&T> {
    let mut rows: Vec<&T> = rows.iter().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(bytes(row)));
    rows
}

fn allocation(group: &AllocationGroup, all: u64, frames: usize, shape: &Shape) -> Allocation {
    let (tensor, tensor_shape) = match &group.tensor_name_pattern {
        Some(pattern) => (Some(pattern), &group.common_tensor_shape),
        None => (group.tensor_name.as_ref(), &group.tensor_shape),
    };
    Allocation {
        size: Size::of(group.bytes),
        share: percent(group.bytes, all),
        blocks: group.blocks,
        category: group.category.name().to_owned(),
        phase: group.phase.name().to_owned(),
        tensor: tensor.map(|name| shape.text(name)),
        shape: tensor_shape.as_deref().map(|text| shape.text(text)),
        place: SourceLocation::of(&group.stack, frames, shape),
    }
}
