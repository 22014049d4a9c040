//! The table `ranks`: one row for each device of each process, with the peak of every phase. It is small, so that the
//! table of a thousand ranks needs no events. A file of an older version lacks some columns, which are unknown then.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::RankSource;
use memtrace_insight::passes::Phase;

use super::reader::ReadTable;
use super::writer::{Columns, Field, Table};

/// The name of the table, and of its folder.
pub const RANKS_TABLE: &str = "ranks";
/// The file name of the part of one run.
pub const RANKS_FILE: &str = "ranks.parquet";
/// The number of columns before those of the phases.
const FIXED: usize = 31;

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowExit {
    /// The exit status, if it exited.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

/// The run of a row.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RowRun {
    /// The name of the run.
    pub name: String,
    /// The job's id. Empty if it is unknown.
    pub job: String,
    /// The source of the job's id ([`memtrace_input::load::JobIdSource::name`]).
    pub job_source: String,
    /// The start of the run in nanoseconds since the Unix epoch, by its host's clock.
    pub started_ns: Option<u64>,
    /// The version of memtrace that recorded the run. Empty if it is unknown.
    pub memtrace_version: String,
}

/// The rank of a process, and its relation to it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankAssignment {
    /// The rank in the job.
    pub number: Option<u32>,
    /// The source of the rank, if it is known.
    pub source: Option<RankSource>,
    /// The rank on its host, if it is known.
    pub local: Option<u32>,
    /// The number of the host in the job, if it is known.
    pub node: Option<u32>,
    /// Whether the process is the rank's own, not a worker that inherited the rank.
    pub is_rank_process: bool,
    /// The rank whose worker or helper the process is. `None` for the rank's own process, for another process that had
    /// the rank, and for processes that belong to no rank.
    pub helper_of: Option<u32>,
    /// The number of ranks of the job.
    pub world_size: Option<u32>,
}

/// A process and its recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RowProcess {
    /// The process id.
    pub pid: u32,
    /// The host's name. Empty if it is unknown.
    pub host: String,
    /// The file name of the trace.
    pub trace: String,
    /// The number of steps, if it is known.
    pub steps: Option<u32>,
    /// The number of out-of-memory errors.
    pub ooms: u64,
    /// Whether an out-of-memory error ended the process, if it is known.
    pub ended_by_oom: Option<bool>,
    /// How the process ended.
    pub exit: RowExit,
    /// The number of recorded events of the process.
    pub events: u64,
    /// The number of events that are known to be missing from the process.
    pub lost_events: u64,
}

/// A device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RowDevice {
    /// The device's ordinal; -1 is the CPU. `None` if the process, which is a rank, allocated nothing.
    pub ordinal: Option<i16>,
    /// Whether the device is the rank's own, if it is known.
    pub is_rank_device: Option<bool>,
    /// The PCI bus id of the device. Empty if it is unknown.
    pub pci_bus_id: String,
    /// The device's memory in bytes, if it is known.
    pub bytes: Option<u64>,
}

/// The peaks of a process on a device, in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RowPeaks {
    /// The peak of allocated bytes.
    pub allocated: u64,
    /// The peak of reserved bytes.
    pub reserved: u64,
    /// The sum of the peaks of memory outside PyTorch's caching allocator, if it is known.
    pub outside_pytorch: Option<u64>,
    /// The most bytes that the process took from the device, by all its libraries, if it is known.
    pub used: Option<u64>,
    /// The phase of the peak of allocated bytes, if it is known.
    pub phase: Option<Phase>,
    /// The step of that peak. `None` before the first step, and if it is unknown.
    pub step: Option<u32>,
    /// The peak of allocated bytes in each phase, in the order of [`Phase::ALL`]. `None` if the phase does not occur.
    pub by_phase: [Option<u64>; Phase::ALL.len()],
}

/// One device of one process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankRow {
    /// The run.
    pub run: RowRun,
    /// The rank of the process.
    pub rank: RankAssignment,
    /// The process.
    pub process: RowProcess,
    /// The device.
    pub device: RowDevice,
    /// The peaks of the process on the device.
    pub peaks: RowPeaks,
}

/// The names of the columns before those of the phases, with their types. The run is in the path.
const COLUMNS: &Columns = &[
    ("job", Field::OptionalText("")),
    ("job_source", Field::OptionalText("")),
    ("rank", Field::OptionalInt32(None)),
    ("rank_source", Field::OptionalText("")),
    ("local_rank", Field::OptionalInt32(None)),
    ("node_rank", Field::OptionalInt32(None)),
    ("is_rank_process", Field::Bool(false)),
    ("helper_of", Field::OptionalInt32(None)),
    ("world_size", Field::OptionalInt32(None)),
    ("pid", Field::OptionalInt32(None)),
    ("host", Field::OptionalText("")),
    ("trace", Field::Text("")),
    ("device", Field::OptionalInt32(None)),
    ("is_rank_device", Field::OptionalBool(None)),
    ("pci_bus_id", Field::OptionalText("")),
    ("device_bytes", Field::OptionalInt64(None)),
    ("peak_allocated", Field::Int64(0)),
    ("peak_reserved", Field::Int64(0)),
    ("outside_pytorch_bytes", Field::OptionalInt64(None)),
    ("peak_used", Field::OptionalInt64(None)),
    ("peak_phase", Field::OptionalText("")),
    ("peak_step", Field::OptionalInt32(None)),
    ("steps", Field::OptionalInt32(None)),
    ("ooms", Field::Int64(0)),
    ("ended_by_oom", Field::OptionalBool(None)),
    ("exit_code", Field::OptionalInt32(None)),
    ("exit_signal", Field::OptionalInt32(None)),
    ("events", Field::Int64(0)),
    ("lost_events", Field::Int64(0)),
    ("started_ns", Field::OptionalInt64(None)),
    ("memtrace", Field::OptionalText("")),
    ("peak_load", Field::OptionalInt64(None)),
    ("peak_data", Field::OptionalInt64(None)),
    ("peak_forward", Field::OptionalInt64(None)),
    ("peak_backward", Field::OptionalInt64(None)),
    ("peak_recompute", Field::OptionalInt64(None)),
    ("peak_optimizer", Field::OptionalInt64(None)),
    ("peak_eval", Field::OptionalInt64(None)),
    ("peak_generate", Field::OptionalInt64(None)),
    ("peak_rollout", Field::OptionalInt64(None)),
    ("peak_other", Field::OptionalInt64(None)),
];

/// Writes the part of the table that one run has.
///
/// # Errors
///
/// The errors of the output.
pub fn write_ranks(rows: &[RankRow], out: &mut (dyn Write + Send)) -> Result<()> {
    let mut write = || -> parquet::errors::Result<()> {
        let mut table = Table::new(RANKS_TABLE, COLUMNS, 0, out)?;
        let number = |value: Option<u32>| Field::OptionalInt32(value.map(|value| value as i32));
        for RankRow { run, rank, process, device, peaks } in rows {
            let mut fields = vec![
                Field::OptionalText(&run.job),
                Field::OptionalText(&run.job_source),
                number(rank.number),
                Field::OptionalText(rank.source.map_or("", RankSource::name)),
                number(rank.local),
                number(rank.node),
                Field::Bool(rank.is_rank_process),
                number(rank.helper_of),
                number(rank.world_size),
                number(Some(process.pid)),
                Field::OptionalText(&process.host),
                Field::Text(&process.trace),
                Field::OptionalInt32(device.ordinal.map(i32::from)),
                Field::OptionalBool(device.is_rank_device),
                Field::OptionalText(&device.pci_bus_id),
                Field::OptionalInt64(device.bytes),
                Field::Int64(peaks.allocated),
                Field::Int64(peaks.reserved),
                Field::OptionalInt64(peaks.outside_pytorch),
                Field::OptionalInt64(peaks.used),
                Field::OptionalText(peaks.phase.map_or("", Phase::name)),
                number(peaks.step),
                number(process.steps),
                Field::Int64(process.ooms),
                Field::OptionalBool(process.ended_by_oom),
                Field::OptionalInt32(process.exit.code),
                Field::OptionalInt32(process.exit.signal),
                Field::Int64(process.events),
                Field::Int64(process.lost_events),
                Field::OptionalInt64(run.started_ns),
                Field::OptionalText(&run.memtrace_version),
            ];
            fields.extend(peaks.by_phase.map(Field::OptionalInt64));
            table.row(&fields)?;
        }
        table.finish()
    };
    write().map_err(|e| Error::io("cannot write the table of ranks")(std::io::Error::other(e)))
}

/// Reads the part of the table that one run has. `run` is the value of the partition. Columns that are missing or of
/// another type are empty.
///
/// # Errors
///
/// If the file is not a Parquet file, or is damaged.
pub fn read_ranks(path: &Path, file: File, run: &str) -> Result<Vec<RankRow>> {
    let rows = ReadTable::of(file).map(|table| (0..table.rows).map(|at| rank_row(&table, at, run)).collect());
    rows.map_err(|e| Error::io(format!("cannot read {}", path.display()))(std::io::Error::other(e)))
}

fn rank_row(table: &ReadTable, at: usize, run: &str) -> RankRow {
    let text = |name: &str| table.text(name, at);
    let long = |name: &str| table.number(name, at).and_then(|number| u64::try_from(number).ok());
    let int = |name: &str| table.number(name, at).and_then(|number| i32::try_from(number).ok());
    let unsigned = |name: &str| int(name).map(i32::cast_unsigned);
    let flag = |name: &str| table.number(name, at).map(|number| number == 1);
    let (rank, is_rank_process) = (unsigned("rank"), flag("is_rank_process").unwrap_or_default());
    // Without the column, a process that is not the rank's own inherited its rank.
    let inherited = rank.filter(|_| !is_rank_process);
    let mut by_phase = [None; Phase::ALL.len()];
    for (peak, (name, _)) in by_phase.iter_mut().zip(COLUMNS.iter().skip(FIXED)) {
        *peak = long(name);
    }
    RankRow {
        run: RowRun {
            name: run.to_owned(),
            job: text("job"),
            job_source: text("job_source"),
            started_ns: long("started_ns"),
            memtrace_version: text("memtrace"),
        },
        rank: RankAssignment {
            number: rank,
            source: RankSource::from_name(&text("rank_source")),
            local: unsigned("local_rank"),
            node: unsigned("node_rank"),
            is_rank_process,
            helper_of: if table.has("helper_of") { unsigned("helper_of") } else { inherited },
            world_size: unsigned("world_size"),
        },
        process: RowProcess {
            pid: unsigned("pid").unwrap_or_default(),
            host: text("host"),
            trace: text("trace"),
            steps: unsigned("steps"),
            ooms: long("ooms").unwrap_or_default(),
            ended_by_oom: flag("ended_by_oom"),
            exit: RowExit { code: int("exit_code"), signal: int("exit_signal") },
            events: long("events").unwrap_or_default(),
            lost_events: long("lost_events").unwrap_or_default(),
        },
        device: RowDevice {
            ordinal: int("device").and_then(|device| i16::try_from(device).ok()),
            is_rank_device: flag("is_rank_device"),
            pci_bus_id: text("pci_bus_id"),
            bytes: long("device_bytes"),
        },
        peaks: RowPeaks {
            allocated: long("peak_allocated").unwrap_or_default(),
            reserved: long("peak_reserved").unwrap_or_default(),
            outside_pytorch: long("outside_pytorch_bytes"),
            used: long("peak_used"),
            phase: Phase::from_name(&text("peak_phase")),
            step: unsigned("peak_step"),
            by_phase,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_they_were_written() {
        let phases: Vec<String> = Phase::ALL.iter().map(|phase| format!("peak_{}", phase.name())).collect();
        let columns: Vec<&str> = COLUMNS.iter().skip(FIXED).map(|(name, _)| *name).collect();
        assert_eq!(columns, phases);
        let full = RankRow {
            run: RowRun {
                name: "a".into(),
                job: "71.0".into(),
                job_source: "SLURM_JOB_ID".into(),
                started_ns: Some(1_790_000_000_000_000_000),
                memtrace_version: "0.1.0".into(),
            },
            rank: RankAssignment {
                number: Some(3),
                source: Some(RankSource::Slurm),
                local: Some(1),
                node: Some(2),
                is_rank_process: true,
                helper_of: Some(4),
                world_size: Some(8),
            },
            process: RowProcess {
                pid: 42,
                host: "node7".into(),
                trace: "42.mtr".into(),
                steps: Some(6),
                ooms: 2,
                ended_by_oom: Some(true),
                exit: RowExit { code: None, signal: Some(9) },
                events: 1_000_000,
                lost_events: 1,
            },
            device: RowDevice {
                ordinal: Some(-1),
                is_rank_device: Some(false),
                pci_bus_id: "0000:17:00.0".into(),
                bytes: Some(80 << 30),
            },
            peaks: RowPeaks {
                allocated: 7 << 30,
                reserved: 8 << 30,
                outside_pytorch: Some(1 << 20),
                used: Some(9 << 30),
                phase: Some(Phase::Backward),
                step: Some(5),
                by_phase: std::array::from_fn(|i| (i % 3 > 0).then_some(i as u64)),
            },
        };
        let empty = RankRow { run: RowRun { name: "a".into(), ..RowRun::default() }, ..RankRow::default() };
        let rows = [full, empty];
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write_ranks(&rows, file.as_file_mut()).unwrap();
        let read = read_ranks(file.path(), file.reopen().unwrap(), "a").unwrap();
        assert_eq!(read, rows);
        std::fs::write(file.path(), "PAR1 no").unwrap();
        assert!(read_ranks(file.path(), file.reopen().unwrap(), "a").is_err());
    }

    /// The columns of memtrace before the version 2.0 of the report of a job.
    const OLD_COLUMNS: [&str; 19] = [
        "job",
        "job_source",
        "rank",
        "is_rank_process",
        "world_size",
        "pid",
        "host",
        "trace",
        "device",
        "device_bytes",
        "peak_allocated",
        "peak_reserved",
        "ooms",
        "exit_code",
        "exit_signal",
        "events",
        "lost_events",
        "started_ns",
        "memtrace",
    ];

    #[test]
    fn columns_that_an_older_file_lacks_are_unknown() {
        let is_old = |name: &str| {
            OLD_COLUMNS.contains(&name) || name.starts_with("peak_") && Phase::from_name(&name[5..]).is_some()
        };
        let old: Vec<_> = COLUMNS.iter().copied().filter(|(name, _)| is_old(name)).collect();
        assert_eq!(old.len(), OLD_COLUMNS.len() + Phase::ALL.len());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut table = Table::new(RANKS_TABLE, &old, 0, file.as_file_mut()).unwrap();
        for is_rank_process in [true, false] {
            let fields = old.iter().map(|(name, field)| match *name {
                "rank" => Field::OptionalInt32(Some(3)),
                "is_rank_process" => Field::Bool(is_rank_process),
                "peak_allocated" => Field::Int64(7),
                "peak_load" => Field::OptionalInt64(Some(5)),
                _ => *field,
            });
            table.row(&fields.collect::<Vec<_>>()).unwrap();
        }
        table.finish().unwrap();
        let read = read_ranks(file.path(), file.reopen().unwrap(), "a").unwrap();
        let mut by_phase = [None; Phase::ALL.len()];
        by_phase[Phase::Load as usize] = Some(5);
        let own = RankRow {
            run: RowRun { name: "a".into(), ..RowRun::default() },
            rank: RankAssignment { number: Some(3), is_rank_process: true, ..RankAssignment::default() },
            peaks: RowPeaks { allocated: 7, by_phase, ..RowPeaks::default() },
            ..RankRow::default()
        };
        let worker = RankRow {
            rank: RankAssignment { is_rank_process: false, helper_of: Some(3), ..own.rank.clone() },
            ..own.clone()
        };
        assert_eq!(read, [own, worker]);
    }
}
