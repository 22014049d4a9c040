//! Bytes by category over time: the files of PyTorch's deprecated `export_memory_timeline`, and pictures.
//!
//! The curve is built in one pass. The recording is divided into slices with equal numbers of events. Each slice keeps
//! its peak, so no peak is lost even with few points. If there are at most as many events as points, every slice has
//! one event, and nothing is left out.
//!
//! A block's category is known at the end of its lifetime. Then the block is added to all peaks at which it was
//! allocated. Only the peak of the last slice can still move. Blocks that were freed in that slice are kept separately
//! and dropped if it moves.

mod axes;
mod canvas;
pub(super) mod curve;
mod json;
pub(super) mod page;
mod picture;

use std::io::Write;
use std::path::Path;

use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::Story;
use memtrace_replay::Names;

use curve::CurveBuilder;

/// The format to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimelineForm {
    /// `[times in microseconds, [0, bytes by PyTorch's categories]]`.
    Json,
    /// `[time in nanoseconds, action, bytes, category]` of every change, with PyTorch's numbers.
    RawJson,
    /// `RawJson`, compressed with gzip.
    RawJsonGz,
    /// An HTML page with a picture.
    Html,
    /// A PNG picture.
    Png,
}

impl TimelineForm {
    /// The format for a file name, by its ending. `None` for an unknown ending.
    pub fn of(path: &Path) -> Option<TimelineForm> {
        let name = path.file_name()?.to_str()?;
        let forms = [
            (".raw.json.gz", TimelineForm::RawJsonGz),
            (".raw.json", TimelineForm::RawJson),
            (".json", TimelineForm::Json),
            (".html", TimelineForm::Html),
            (".png", TimelineForm::Png),
        ];
        forms.into_iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, form)| form)
    }

    /// The maximum number of points.
    pub(super) const fn points(self) -> u64 {
        match self {
            TimelineForm::Json | TimelineForm::RawJson | TimelineForm::RawJsonGz | TimelineForm::Png => 100_000,
            TimelineForm::Html => 2_000,
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
    form: TimelineForm,
    out: impl Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let mut builder = CurveBuilder::new(window, device, recording.event_count(), form.points());
    let names = Names::of(recording);
    Story::with(recording, process.survey(), &names, &mut builder, progress);
    let curve = builder.finish(&recording.calibration());
    let written = match form {
        TimelineForm::Json => json::coalesced(&curve, out),
        TimelineForm::RawJson => json::raw(&curve, out),
        TimelineForm::RawJsonGz => {
            let mut compressed = flate2::write::GzEncoder::new(out, flate2::Compression::default());
            json::raw(&curve, &mut compressed).and_then(|()| compressed.finish().map(drop))
        }
        TimelineForm::Html => page::html(&curve, &title(process, device), out),
        TimelineForm::Png => picture::png(&curve, &title(process, device), out),
    };
    written.map_err(Error::io("cannot write the timeline"))
}

/// Formats a title: `GPU 0, rank 3`.
pub(super) fn title(process: &Process, device: i16) -> String {
    let place = if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    match process.rank() {
        Some(rank) => format!("{place}, rank {rank}"),
        None => format!("{place}, pid {}", process.pid()),
    }
}
