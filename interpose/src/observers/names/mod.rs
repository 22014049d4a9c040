//! Tensor names: what the program calls its tensors and modules.
//!
//! Examples are `layer1.0.conv1.weight`, its `.grad`, and `Adam.exp_avg of layer1.0.conv1.weight`. Only the program's
//! own objects hold these names. A pending call (`Py_AddPendingCall`) reads them between two Python instructions, while
//! its thread holds the GIL.
//!
//! Constraints: a scan runs no Python code and keeps no object. It changes a reference count only for the duration of a
//! read.
//!
//! The garbage collector's lists contain every `nn.Module` and every optimizer. A module that no other module contains
//! is a model. This heap scan takes milliseconds, so later scans visit only the models that it found. An object is
//! still alive if both of its neighbors in the collector's list link to it.
//!
//! A scan is requested on these occasions:
//! - after a backward pass, when the gradients exist;
//! - around an optimizer step, when the optimizer state exists;
//! - when an allocation fails;
//! - when the program calls a module or an optimizer that no scan has seen;
//! - in a program that does none of these, after it has freed 16, 128, 1024 ... blocks.
//!
//! [`schedule`] decides which requests are served. It counts occasions and never reads a clock. A name is reported
//! again only for other memory: every free increments a number that belongs to a hash of the address
//! ([`Watch`](crate::recording::watch::Watch)).

mod address_hash;
mod object_id;
mod reported;
pub(crate) mod requests;
mod roots;
mod scan;
mod schedule;
mod step_sites;
mod walk;
