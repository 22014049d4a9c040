//! The runs of one job on many hosts: `memtrace report DIR`, and the partitioned tables of `memtrace export`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, ensure};
use memtrace_analysis::export::{
    RANKS_FILE, RANKS_TABLE, RankRow, TABLES, TableLayout, Window, partition_folder, tables, write_ranks,
};
use memtrace_analysis::report::{JobOrRuns, RunListText, job_or_runs, number_text};
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{
    FoundRun, JobOptions, Process, Progress, RunFolder, ToText, find_runs, is_run_folder, job_html, job_report,
    rank_rows, rank_rows_of_run,
};

use crate::cli::{Export, Report};
use crate::host::local_minute;
use crate::message::{self, WithHelp};
use crate::output::{Printed, Stream};
use crate::terminal::{ProgressLine, layout};

/// Whether a path names no run, but a folder that has some: run folders, or the tables of an export.
pub(super) fn is_folder_of_runs(path: &Path) -> bool {
    path.is_dir()
        && !is_run_folder(path)
        && (path.join(RANKS_TABLE).is_dir() || find_runs(path).is_ok_and(|runs| !runs.is_empty()))
}

/// Prints the report of the job in a folder, or lists its runs if they are of several jobs.
pub(super) fn report(path: &Path, options: &Report) -> anyhow::Result<()> {
    let for_one_run = options.section.is_some() || options.range.is_some() || options.categories.is_some();
    ensure!(
        !for_one_run,
        WithHelp::new(
            format!("{} has several runs, and --section, --range and --categories are for one", path.display()),
            "pass one of its run folders, or leave them out"
        )
    );
    ensure!(
        path.is_dir(),
        WithHelp::new(
            format!("cannot read {}: it is not a folder", path.display()),
            "pass a folder of run folders, or a run folder"
        )
    );
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let job_options = JobOptions { job: options.job.clone(), compares: true };
    let mut progress = |progress: Progress<'_>| line.show(&progress);
    // A list is for people. A program, and who asks for a table, gets an error that names the jobs.
    let report = if options.json || options.html.is_some() || options.ranks {
        job_report(path, &job_options, &mut progress).map(|report| JobOrRuns::Job(Box::new(report)))
    } else {
        job_or_runs(path, &job_options, &mut progress)
    };
    line.clear();
    let report = match report? {
        JobOrRuns::Job(report) => report,
        JobOrRuns::Runs(list) => {
            let text = RunListText { list: &list, time: local_minute }.to_text(&layout(Stream::Stdout, false));
            return super::write_output(Printed::Styled(&text), None);
        }
    };
    if let Some(output) = &options.html {
        let mut page = Vec::new();
        job_html(&report, &mut page)?;
        return super::write_page(&page, output.as_deref(), super::REPORT_PAGE);
    }
    if options.json {
        return super::write_output(Printed::Json(&report.to_json()), None);
    }
    let layout = layout(Stream::Stdout, options.verbose || options.ranks);
    super::write_output(Printed::Styled(&report.to_text(&layout)), None)
}

/// Writes the partitioned tables of a run, or of all runs in a folder.
pub(super) fn export(options: &Export, rules: Option<&CustomRules>) -> anyhow::Result<()> {
    let whole = !options.window.is_limited() && options.window.device.is_none();
    ensure!(
        whole && options.rank.is_none() && options.pid.is_none(),
        WithHelp::new(
            "--partition writes whole runs",
            "leave out --rank, --pid, --device, --steps, --range, --time, --min-size and --max-events"
        )
    );
    let output = options.output.as_deref().context(WithHelp::new(
        "--partition writes a folder for each table",
        "name the folder of all tables with -o DIR",
    ))?;
    let path = match &options.run {
        Some(run) => run.clone(),
        None => super::run_or_newest(None)?,
    };
    let runs = if path.is_dir() { find_runs(&path)? } else { Vec::new() };
    if !runs.is_empty() {
        let mut left_out = 0;
        for run in &runs {
            // One damaged run does not hold up the others.
            if let Err(e) = export_run(run, output, rules).with_context(|| format!("cannot export {}", run.name)) {
                ensure!(runs.len() > 1, e);
                message::warning(&format!("{e:#}"));
                left_out += 1;
            }
        }
        ensure!(
            left_out < runs.len(),
            WithHelp::new(format!("cannot export any of {}", number_text(left_out as u64, "run")), "see the warnings")
        );
        let written = number_text((runs.len() - left_out) as u64, "run");
        message::status(&format!("wrote the tables of {written} into {}", output.display()));
        return Ok(());
    }
    let name = path.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
    export_run(&FoundRun { name, path }, output, rules)?;
    message::status(&format!("wrote the tables of 1 run into {}", output.display()));
    Ok(())
}

fn export_run(found: &FoundRun, output: &Path, rules: Option<&CustomRules>) -> anyhow::Result<()> {
    let run = super::open(&found.path)?;
    for (process, name) in run.processes().iter().zip(run.process_names()) {
        export_process(process, &name, &found.name, output, rules)?;
    }
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let mut progress = |progress: Progress<'_>| line.show(&progress);
    let rows = if is_run_folder(&found.path) {
        rank_rows(found, &mut progress)
    } else {
        rank_rows_of_run(&found.name, &run, &mut progress)
    };
    line.clear();
    export_ranks(&rows?, &found.name, output)
}

/// Writes the tables of one process. The name of its file is that of the process, so that workers of a rank are
/// separate.
fn export_process(
    process: &Process,
    name: &str,
    run: &str,
    output: &Path,
    rules: Option<&CustomRules>,
) -> anyhow::Result<()> {
    let file_name = format!("{name}.parquet");
    let folders = TABLES
        .iter()
        .map(|table| folder(output, &partition_folder(table, run, Some(process.rank()))))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let cannot = || format!("cannot write into {}", output.display());
    let mut new = folders
        .iter()
        .map(|folder| folder.create_atomic(&file_name).with_context(cannot))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut files = new.iter_mut().map(|new| new.file().try_clone()).collect::<Result<Vec<File>, _>>()?.into_iter();
    let mut next = || files.next().map(BufWriter::new).context("each table has a file");
    let mut files = [next()?, next()?, next()?, next()?];
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let (what, total) = ("writing the tables", process.recording().event_count());
    let outputs = files.each_mut().map(|file| file as &mut (dyn Write + Send));
    let written = tables(process, run, TableLayout::Partitioned, &Window::WHOLE, rules, outputs, &mut |done| {
        line.show(&Progress { what, done, total })
    });
    line.clear();
    written.with_context(|| format!("cannot export to {}", output.display()))?;
    files.iter_mut().try_for_each(|file| file.flush()).with_context(cannot)?;
    new.into_iter().try_for_each(|new| new.commit()).with_context(cannot)
}

fn export_ranks(rows: &[RankRow], run: &str, output: &Path) -> anyhow::Result<()> {
    let folder = folder(output, &partition_folder(RANKS_TABLE, run, None))?;
    let cannot = || format!("cannot write into {}", output.display());
    let mut new = folder.create_atomic(RANKS_FILE).with_context(cannot)?;
    write_ranks(rows, new.file()).with_context(cannot)?;
    new.commit().with_context(cannot)
}

/// Creates and opens a folder of the tables.
fn folder(output: &Path, relative: &Path) -> anyhow::Result<RunFolder> {
    let path = output.join(relative);
    let cannot = || format!("cannot create {}", path.display());
    std::fs::create_dir_all(&path).with_context(cannot)?;
    RunFolder::open(&path).with_context(cannot)
}
