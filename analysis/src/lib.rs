//! After the run: traces in, snapshots and reports out.
