//! Reports for people: the terminal report, HTML, line tables, comparisons and checks as text.
//!
//! This crate draws the results of `memtrace-summary` and concludes nothing itself. Text and JSON therefore always
//! agree.
//!
//! ```
//! use memtrace_report::{TextOptions, ToText};
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let summary = memtrace_summary::summarize(&run, &mut |_progress| {})?;
//! let text = summary.to_text(&TextOptions::default());
//! assert!(text.contains("Largest allocations"));
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod check_text;
mod cuda_graphs;
mod device;
mod diff_html;
mod diff_text;
mod finish;
mod fit;
mod holders;
mod host;
mod html;
mod job_html;
mod job_text;
mod launch_text;
mod lines_html;
mod lines_text;
mod markup;
mod page;
mod parts;
mod pools;
mod rank_table_text;
mod redacted_run;
mod released;
mod run_list_text;
mod sections;
mod server;
mod statistics;
mod step_table;
mod style;
mod table;
mod text;
mod text_report;
mod verdict;
mod xla;

pub use check_text::{check_text, github_annotations};
pub use diff_html::{DiffPageRun, diff_html};
pub use finish::{FinishOptions, FinishedRun, HTML_REPORT, finish_run};
pub use html::{HtmlOptions, PageWindow, html_report, html_window, served_policy};
pub use job_html::job_html;
pub use lines_html::lines_html;
pub use redacted_run::{can_redact, redact_run};
pub use run_list_text::RunListText;
pub use sections::{SECTIONS, Section, range_text, section_text};
pub use style::{TextOptions, ToText};
