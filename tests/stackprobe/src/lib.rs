//! The preloaded library's stack walker alone, behind a C interface that Python's ctypes can call.
//!
//! `CDLL` releases the GIL around a call, `PyDLL` keeps it. Both must give the stack that the interpreter's own
//! traceback shows. `tests/programs/stacks` holds the programs; `run` runs them with a list of interpreters.

pub mod native;
pub mod probe;
