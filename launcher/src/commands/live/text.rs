//! The figures of running recordings as text.

use memtrace_analysis::report::{
    LiveDevice, LiveGrowth, LiveHost, LiveProcessReport, LiveReport, LiveStack, count_text, estimated_duration_text,
    share_text, signed_size_text, size_text,
};

/// The number of stacks in the text of one device.
const STACKS: usize = 5;

/// The report, line by line.
pub(super) fn lines(report: &LiveReport) -> Vec<String> {
    let mut lines = Vec::new();
    for recording in &report.recordings {
        lines.push(format!("{} (memtrace {})", recording.folder, recording.launcher_pid));
        lines.extend(recording.problems.iter().map(|problem| format!("  {problem}")));
        if recording.processes.is_empty() && recording.problems.is_empty() {
            lines.push("  nothing recorded yet".to_owned());
        }
        lines.extend(recording.host.as_ref().map(|host| format!("  {}", main_memory(host))));
        for process in &recording.processes {
            lines.push(format!("  {}: {}", process_name(process), position(process)));
            for device in &process.devices {
                lines.push(format!("    {}: {}", device_name(device), totals(device)));
                lines.push(format!("      {}", categories(device)));
                lines.push(format!("      {}", growth(&device.growth)));
                let row = |bytes: u64, category: &str, place: &str| {
                    format!("      {:>9}  {category:<21} {place}", size_text(bytes))
                };
                let stacks = device.stacks.iter().take(STACKS);
                lines.extend(stacks.map(|stack| row(stack.bytes, stack.category.plural(), place(stack))));
            }
        }
    }
    lines
}

/// Where a stack allocates.
pub(super) fn place(stack: &LiveStack) -> &str {
    if stack.location.is_empty() { "(unknown stack)" } else { &stack.location }
}

/// `main memory 2.00 GiB, peak 3.00 GiB, of 64.0 GiB; main memory grows by 1.00 MiB a minute`.
pub(super) fn main_memory(host: &LiveHost) -> String {
    let growth = host.growth.as_ref().map(|text| format!("; {text}")).unwrap_or_default();
    let [now, peak, limit] = [host.bytes, host.peak_bytes, host.limit_bytes].map(size_text);
    format!("main memory {now}, peak {peak}, of {limit}{growth}")
}

/// `rank 0 (pid 17)`, or `pid 17`.
pub(super) fn process_name(process: &LiveProcessReport) -> String {
    process.rank.map_or_else(|| format!("pid {}", process.pid), |rank| format!("rank {rank} (pid {})", process.pid))
}

/// `step 12, forward, 1,234 events`.
pub(super) fn position(process: &LiveProcessReport) -> String {
    let step =
        process.step.map_or("before the first step".to_owned(), |step| format!("step {}", count_text(step.into())));
    let ooms = match process.oom_count {
        0 => String::new(),
        1 => ", 1 out-of-memory error".to_owned(),
        count => format!(", {} out-of-memory errors", count_text(count)),
    };
    format!("{step}, {}, {} events{ooms}", process.phase.name(), count_text(process.events))
}

/// `GPU 0`.
pub(super) fn device_name(device: &LiveDevice) -> String {
    if device.device < 0 { "CPU tensors".to_owned() } else { format!("GPU {}", device.device) }
}

/// `allocated 1.00 GiB, reserved 2.00 GiB, in use 3.00 GiB of 80.0 GiB (NVIDIA H100)`.
pub(super) fn totals(device: &LiveDevice) -> String {
    let totals = format!(
        "allocated {}, reserved {}",
        size_text(device.totals.allocated_bytes),
        size_text(device.totals.reserved_bytes)
    );
    let of_device = match (device.used_bytes, device.total_bytes) {
        (Some(used), Some(total)) => format!(", in use {} of {}", size_text(used), size_text(total)),
        (None, Some(total)) => format!(" of {}", size_text(total)),
        _ => String::new(),
    };
    let name = device.name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
    format!("{totals}{of_device}{name}")
}

/// `parameters 1.00 GiB (50 %), ...`.
fn categories(device: &LiveDevice) -> String {
    let mut categories = device.by_category.clone();
    categories.sort_by_key(|amount| std::cmp::Reverse(amount.bytes));
    let text = |bytes| format!("{} ({})", size_text(bytes), share_text(bytes, device.totals.allocated_bytes));
    let parts: Vec<String> =
        categories.iter().map(|amount| format!("{} {}", amount.category.plural(), text(amount.bytes))).collect();
    if parts.is_empty() { "no blocks".to_owned() } else { parts.join(", ") }
}

/// `growth +1.00 MiB/step, +60.0 MiB/min; out of memory in 20 min at this rate`.
pub(super) fn growth(growth: &LiveGrowth) -> String {
    let step = growth.per_step_bytes.map(|bytes| format!("{}/step", signed_size_text(bytes)));
    let minute = growth.per_minute_bytes.map(|bytes| format!("{}/min", signed_size_text(bytes)));
    let rates: Vec<String> = step.into_iter().chain(minute).collect();
    let oom = growth
        .oom_in_ns
        .map_or(String::new(), |ns| format!("; out of memory in {} at this rate", estimated_duration_text(ns)));
    if rates.is_empty() { "growth unknown yet".to_owned() } else { format!("growth {}{oom}", rates.join(", ")) }
}
