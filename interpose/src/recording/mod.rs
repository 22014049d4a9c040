//! The recording of this process: its state, the guard, events and definitions on their way into a ring.
//!
//! Constraint: knows no feature. A feature keeps its state in a [`slot::Slot`] and gets calls through the table of
//! [`observer`]s.

mod annotation;
mod announce;
pub(crate) mod attached;
pub(crate) mod bounded_wait;
mod cancellation;
pub(crate) mod connect;
pub(crate) mod device_use;
pub(crate) mod emit;
pub(crate) mod errno;
mod flush;
pub(crate) mod guard;
mod heap;
mod interpreter;
mod label_ids;
pub(crate) mod labels;
pub(crate) mod left_frame;
pub(crate) mod module_calls;
mod modules;
pub(crate) mod observer;
mod pause;
pub(crate) mod paused;
pub(crate) mod process;
pub(crate) mod rank;
mod reuse;
pub(crate) mod run_lock;
mod seccomp;
mod sink;
pub(crate) mod slot;
pub(crate) mod sparse_table;
pub(crate) mod thread_local;
mod thread_state;
mod unrecorded;
pub(crate) mod watch;
pub(crate) mod wiped_on_fork;
