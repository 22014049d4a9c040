//! `memtrace run --metrics ADDR`: figures of the processes that are being recorded, for Prometheus.
//!
//! The drain thread replays the events of each process before it hands them on ([`figures`]). A server answers each scrape
//! from there ([`server`]), in the format that the scraper accepts ([`exposition`]).

mod exposition;
mod figures;
mod server;

pub(crate) use figures::{Figures, ProcessFigures};
pub(crate) use server::{MetricsListener, MetricsServer};
