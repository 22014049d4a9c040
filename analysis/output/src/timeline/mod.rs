//! Bytes by category over time: the JSON of PyTorch's deprecated `export_memory_timeline`, and a picture.
//!
//! The curve is built in one pass. The recording is divided into slices with equal numbers of events. Each slice keeps
//! its peak, so no peak is lost even with few points. If there are at most as many events as points, every slice has
//! one event, and nothing is left out.
//!
//! A block's category is known at the end of its lifetime. Then the block is added to all peaks at which it was
//! allocated. Only the peak of the last slice can still move. Blocks that were freed in that slice are kept separately
//! and dropped if it moves.

mod axes;
pub(super) mod curve;
mod json;
mod svg;

use std::io::Write;
use std::path::Path;

use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{Analysis, FirstPass};

use curve::CurveBuilder;

/// The format to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimelineFormat {
    /// `[times in microseconds, [0, bytes by PyTorch's categories]]`.
    Json,
    /// An SVG picture.
    Svg,
}

impl TimelineFormat {
    /// The format for a file name, by its ending. `None` for an unknown ending.
    pub fn of(path: &Path) -> Option<TimelineFormat> {
        match path.extension()?.to_str()? {
            "json" => Some(TimelineFormat::Json),
            "svg" => Some(TimelineFormat::Svg),
            _ => None,
        }
    }

    /// The maximum number of points.
    pub(super) const fn points(self) -> u64 {
        match self {
            TimelineFormat::Json => 100_000,
            TimelineFormat::Svg => 2_000,
        }
    }
}

/// Writes one device's timeline within a window. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn timeline(
    process: &Process,
    window: &Window,
    device: i16,
    format: TimelineFormat,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let mut builder = CurveBuilder::new(window, device, recording.event_count(), format.points());
    let first_pass = FirstPass::of_process(process);
    Analysis::with_observer(recording, process.trace_index(), &first_pass, &mut builder, progress);
    let curve = builder.finish(&recording.calibration());
    let written = match format {
        TimelineFormat::Json => json::write(&curve, out),
        TimelineFormat::Svg => svg::write(&curve, &title(process, device), out),
    };
    written.map_err(Error::io("cannot write the timeline"))
}

/// Formats a title: `GPU 0, rank 3`.
fn title(process: &Process, device: i16) -> String {
    let device_name = if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    match process.rank() {
        Some(rank) => format!("{device_name}, rank {rank}"),
        None => format!("{device_name}, pid {}", process.pid()),
    }
}
