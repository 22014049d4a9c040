//! The pictures of a process for a report page: the timeline and the peak's flame graph of each device, from one pass
//! over the recording.

use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;

use super::flame::{FlameOf, Sums};
use super::flame_picture;
use super::timeline::curve::CurveBuilder;
use super::timeline::{TimelineForm, page, title};
use super::window::Window;
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_insight::passes::{Birth, Judged, Lives, Story};
use memtrace_replay::{Names, Usage};

/// The styles of the pictures' parts, for the page's style sheet.
pub const PICTURE_STYLE: [&str; 2] = [page::STYLE, flame_picture::STYLE];

/// The pictures of one device, as HTML.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// Bytes by category over time.
    pub timeline: String,
    /// Bytes at the peak by call stack.
    pub flame: String,
}

struct Watch<'w> {
    curves: Vec<(i16, CurveBuilder<'w>)>,
    sums: Sums<'w>,
}

impl Lives for Watch<'_> {
    fn began(&mut self, device: i16, birth: &Birth, usage: &Usage) {
        if let Some((_, curve)) = self.curves.iter_mut().find(|(of, _)| *of == device) {
            curve.began(device, birth, usage);
        }
        self.sums.began(device, birth, usage);
    }

    fn ended(&mut self, device: i16, birth: &Birth, judged: &Judged, evidence: FrameId, free: Option<&Event>) {
        if let Some((_, curve)) = self.curves.iter_mut().find(|(of, _)| *of == device) {
            curve.ended(device, birth, judged, evidence, free);
        }
        self.sums.ended(device, birth, judged, evidence, free);
    }
}

/// The pictures of the window's devices, by ordinal. `size` formats bytes; `progress` receives the number of events
/// read so far.
pub fn pictures(
    process: &Process,
    window: &Window,
    size: &dyn Fn(u64) -> String,
    progress: &mut dyn FnMut(u64),
) -> Vec<Picture> {
    let recording = process.recording();
    let (events, points) = (recording.event_count(), TimelineForm::Html.points());
    let curve = |device: &i16| (*device, CurveBuilder::new(window, *device, events, points));
    let curves = window.lanes(process).keys().map(curve).collect();
    let mut watch = Watch { curves, sums: Sums::new(process, window, FlameOf::Peak) };
    Story::with(recording, process.survey(), &Names::of(recording), &mut watch, progress);
    let calibration = recording.calibration();
    let flames = watch
        .sums
        .finish()
        .map(|(_, places)| flame_picture::svg(process.definitions(), &places, "allocated at the peak", size));
    let curves = watch.curves.into_iter().zip(flames);
    let picture = |((device, curve), flame): ((i16, CurveBuilder<'_>), String)| {
        let title = printable::html(&title(process, device));
        Picture { device, timeline: page::svg(&curve.finish(&calibration), &title), flame }
    };
    curves.map(picture).collect()
}
