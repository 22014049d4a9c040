//! The data of the terminal view: the figures, and the user's selection.

use memtrace_analysis::report::{LiveDevice, LiveProcessReport, LiveReport, LiveStack, LiveTensor, size_text};

use super::text::place;

/// The rows of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Table {
    /// Call stacks.
    Stacks,
    /// Tensors with names.
    Tensors,
}

/// The column that the table is sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    Bytes,
    Blocks,
    Category,
    Place,
}

/// A row of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Row {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pub(super) category: &'static str,
    pub(super) place: String,
}

/// The state of the view.
#[derive(Debug)]
pub(super) struct View {
    pub(super) report: LiveReport,
    /// The process id of the shown process.
    pid: Option<u32>,
    /// The index of the shown device.
    device: usize,
    pub(super) table: Table,
    pub(super) sort: Sort,
    pub(super) search: String,
    /// Whether keys go to the search text.
    pub(super) is_searching: bool,
    /// The number of rows above the first one that is shown.
    pub(super) scroll: usize,
    /// Why the figures are not refreshed any more.
    pub(super) message: Option<String>,
}

impl View {
    /// Shows the first process of a report.
    pub(super) fn new(report: LiveReport) -> View {
        View {
            report,
            pid: None,
            device: 0,
            table: Table::Stacks,
            sort: Sort::Bytes,
            search: String::new(),
            is_searching: false,
            scroll: 0,
            message: None,
        }
    }

    /// Replaces the figures by newer ones. The selection stays.
    pub(super) fn update(&mut self, report: LiveReport) {
        self.report = report;
        self.message = None;
    }

    fn processes(&self) -> Vec<(&str, &LiveProcessReport)> {
        let recordings = self.report.recordings.iter();
        recordings.flat_map(|one| one.processes.iter().map(|process| (one.folder.as_str(), process))).collect()
    }

    /// The shown process: its index, the number of processes, its run folder and its figures.
    pub(super) fn process(&self) -> Option<(usize, usize, &str, &LiveProcessReport)> {
        let processes = self.processes();
        let index = processes.iter().position(|(_, process)| Some(process.pid) == self.pid).unwrap_or(0);
        processes.get(index).map(|(folder, process)| (index, processes.len(), *folder, *process))
    }

    /// The shown device.
    pub(super) fn device(&self) -> Option<&LiveDevice> {
        let devices = &self.process()?.3.devices;
        devices.get(self.device).or(devices.first())
    }

    /// Shows the process `by` places after the shown one; after the last comes the first.
    pub(super) fn select_process(&mut self, by: isize) {
        let Some((index, count, ..)) = self.process() else { return };
        let next = (index as isize + by).rem_euclid(count as isize) as usize;
        self.pid = self.processes().get(next).map(|(_, process)| process.pid);
        (self.device, self.scroll) = (0, 0);
    }

    /// Shows the next device of the process.
    pub(super) fn select_next_device(&mut self) {
        let devices = self.process().map_or(0, |(.., process)| process.devices.len());
        self.device = if devices == 0 { 0 } else { (self.device + 1) % devices };
        self.scroll = 0;
    }

    /// The rows of the table that contain the search text, in order.
    pub(super) fn rows(&self) -> Vec<Row> {
        let Some(device) = self.device() else { return Vec::new() };
        let mut rows: Vec<Row> = match self.table {
            Table::Stacks => {
                let row = |stack: &LiveStack| Row {
                    bytes: stack.bytes,
                    blocks: stack.blocks,
                    category: stack.category.plural(),
                    place: place(stack).to_owned(),
                };
                device.stacks.iter().map(row).collect()
            }
            Table::Tensors => {
                let row = |tensor: &LiveTensor| Row {
                    bytes: tensor.bytes,
                    blocks: 1,
                    category: tensor.category.plural(),
                    place: format!("{} {}", tensor.name, tensor.shape).trim_end().to_owned(),
                };
                device.tensors.iter().map(row).collect()
            }
        };
        let search = self.search.to_lowercase();
        rows.retain(|row| {
            row.place.to_lowercase().contains(&search)
                || row.category.to_lowercase().contains(&search)
                || size_text(row.bytes).to_lowercase().contains(&search)
        });
        match self.sort {
            Sort::Bytes => rows.sort_by_key(|row| std::cmp::Reverse(row.bytes)),
            Sort::Blocks => rows.sort_by_key(|row| std::cmp::Reverse(row.blocks)),
            Sort::Category => rows.sort_by_key(|row| (row.category, std::cmp::Reverse(row.bytes))),
            Sort::Place => rows.sort_by(|a, b| a.place.cmp(&b.place)),
        }
        rows
    }
}
