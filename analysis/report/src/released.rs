//! Draws what stayed on a device after the program had released memory.

use memtrace_summary::{DevicePartKind, DeviceSummary, ReleasedSummary, count_text, size_text};

use crate::holders::holder_text;
use crate::text_report::TextReport;

/// The maximum number of allocations listed, and of allocations that block segments.
const LARGEST: usize = 8;

impl TextReport {
    /// The memory that stayed after each point, in full.
    pub(crate) fn released_section(&mut self, device: &DeviceSummary) {
        if device.released.is_empty() {
            return self.line(
                "  the program came to no point that releases memory: name one with --released-after".to_owned(),
            );
        }
        for (at, released) in device.released.iter().enumerate() {
            if at > 0 {
                self.blank();
            }
            self.released_point(released);
        }
    }

    fn released_point(&mut self, released: &ReleasedSummary) {
        let (stayed, start) = (size_text(released.stayed_bytes), size_text(released.start_bytes));
        let times = most_of(released.times);
        self.list(&format!("After {}{times}: {stayed} stayed, of {start} when it began", released.after));
        for part in &released.parts {
            self.row(part.bytes, released.stayed_bytes, &part.name);
        }
        let context = released.device_memory.iter().flat_map(|memory| &memory.parts);
        let context = context.filter(|part| {
            use DevicePartKind::{Context, ContextAndOtherProcesses, Kernels};
            matches!(part.kind, Context | Kernels | ContextAndOtherProcesses)
        });
        let context: Vec<String> = context.map(|part| format!("{} {}", size_text(part.bytes), part.name)).collect();
        if !context.is_empty() {
            self.labelled_list("Beside it", &format!("{}, until the process ends", context.join(", ")));
        }
        self.largest_allocations(&released.state, LARGEST);
        self.blocked_by(Some(&released.reserved), LARGEST);
        if !released.held_by.is_empty() {
            self.list("Held by Python objects");
            for holder in &released.held_by {
                let shape = holder.shape.as_ref().map(|shape| format!("  {shape}")).unwrap_or_default();
                self.item(4, &format!("{}{shape}", holder_text(holder)));
            }
        }
    }

    /// Adds one line about what stayed after each point, with a reference to the section.
    pub(crate) fn released(&mut self, device: &DeviceSummary) {
        let point = |released: &ReleasedSummary| {
            let ReleasedSummary { after, times, stayed_bytes, .. } = released;
            format!("{} after {after}{}", size_text(*stayed_bytes), most_of(*times))
        };
        let points: Vec<String> = device.released.iter().map(point).collect();
        if !points.is_empty() {
            self.labelled_list("Stayed", &format!("{} (--section released)", points.join(", ")));
        }
    }
}

fn most_of(times: u64) -> String {
    if times == 1 { String::new() } else { format!(" (most of {} times)", count_text(times)) }
}
