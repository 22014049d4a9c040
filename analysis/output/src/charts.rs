//! The charts of a process for an HTML report: the timeline and the peak's flame graph of each device, from one pass
//! over the recording.

use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;

use super::flame_graph::{FlameWeight, SiteSums};
use super::flame_svg;
use super::timeline::curve::CurveBuilder;
use super::timeline::{TimelineFormat, html, title};
use super::window::Window;
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_insight::passes::{Analysis, BlockAllocation, BlockClassification, BlockObserver};
use memtrace_replay::{Names, Usage};

/// The styles of the charts' parts, for the page's style sheet.
pub const CHART_STYLES: [&str; 2] = [html::STYLE, flame_svg::STYLE];

/// The charts of one device, as HTML.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceCharts {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// Bytes by category over time.
    pub timeline: String,
    /// Bytes at the peak by call stack.
    pub flame: String,
}

struct ChartBuilder<'w> {
    curves: Vec<(i16, CurveBuilder<'w>)>,
    sums: SiteSums<'w>,
}

impl BlockObserver for ChartBuilder<'_> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        if let Some((_, curve)) = self.curves.iter_mut().find(|(of, _)| *of == device) {
            curve.allocated(device, block, usage);
        }
        self.sums.allocated(device, block, usage);
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    ) {
        if let Some((_, curve)) = self.curves.iter_mut().find(|(of, _)| *of == device) {
            curve.lifetime_ended(device, block, classification, evidence, free);
        }
        self.sums.lifetime_ended(device, block, classification, evidence, free);
    }
}

/// The charts of the window's devices, by ordinal. `size` formats bytes; `progress` receives the number of events
/// read so far.
pub fn device_charts(
    process: &Process,
    window: &Window,
    size: &dyn Fn(u64) -> String,
    progress: &mut dyn FnMut(u64),
) -> Vec<DeviceCharts> {
    let recording = process.recording();
    let (events, points) = (recording.event_count(), TimelineFormat::Html.points());
    let curve = |device: &i16| (*device, CurveBuilder::new(window, *device, events, points));
    let curves = window.sources(process).keys().map(curve).collect();
    let mut builder = ChartBuilder { curves, sums: SiteSums::new(process, window, FlameWeight::Peak) };
    Analysis::with_observer(recording, process.trace_index(), &Names::of(recording), &mut builder, progress);
    let calibration = recording.calibration();
    let flames = builder
        .sums
        .finish()
        .map(|(_, places)| flame_svg::svg(process.definitions(), &places, "in use at the peak", size));
    let curves = builder.curves.into_iter().zip(flames);
    let charts = |((device, curve), flame): ((i16, CurveBuilder<'_>), String)| {
        let title = printable::html(&title(process, device));
        DeviceCharts { device, timeline: html::svg(&curve.finish(&calibration), &title), flame }
    };
    curves.map(charts).collect()
}
