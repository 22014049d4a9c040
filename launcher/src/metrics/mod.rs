//! `memtrace run --metrics ADDR` and `--otlp URL`: figures of the processes that are being recorded, for Prometheus and
//! OpenTelemetry.
//!
//! The drain thread replays the events of each process before it hands them on ([`figures`]). A server answers each
//! scrape from there ([`server`]), in the format that the scraper accepts ([`exposition`]). A push
//! sends them to a collector ([`push`]).
//!
//! The memory by category needs an analysis of the trace. A process of its own follows the traces
//! ([`category_worker`]), and a thread asks it every few seconds ([`categories`]).

mod categories;
pub(crate) mod category_worker;
mod exposition;
mod figures;
mod metric;
mod push;
mod server;

pub(crate) use categories::CategoryReader;
pub(crate) use figures::{Figures, ProcessFigures};
pub(crate) use push::{Push, require as require_push};
pub(crate) use server::MetricsListener;
