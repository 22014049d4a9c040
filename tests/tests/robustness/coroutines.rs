//! Python programs that switch stacks: greenlets and gevent.
//!
//! A greenlet copies parts of its native stack away and back, and another one uses the same addresses meanwhile. So
//! what a thread remembers of its last stack must never stand for the present one. The oracle is the program, which
//! prints its frames.

use crate::hostile_python::assert_same_frames;
use crate::hostile_support::*;
use memtrace_tests::traced_program::{TracedProgram, packages};
use memtrace_trace::counters::Counter;

/// gevent and what it needs.
const PACKAGES: [&str; 4] = ["gevent==26.9.0", "greenlet==3.5.6", "zope.event==6.2", "zope.interface==8.7"];

fn frames(mode: &str) -> TracedProgram {
    let traced = TracedProgram::python("hostile/frames.py", &[mode]).env("SIM_LD_PATH", "1");
    traced.env("PYTHONPATH", packages(&PACKAGES))
}

/// Greenlets that switch, share a generator, are killed, time out, and run beside gevent's threads.
#[test]
fn frames_under_gevent_are_those_of_the_running_greenlet() {
    assert_same_frames(&same_output(frames("gevent")), "gevent");
}

/// Where the native stack has other evaluations than the Python stack has groups of frames, the merged stack keeps all
/// Python frames, and the loss of native ones is counted.
#[test]
fn merged_stacks_of_greenlets_keep_every_python_frame() {
    for mode in ["greenlets", "gevent"] {
        let run = same_output(frames(mode).option("--stacks").option("both"));
        assert_same_frames(&run, mode);
        println!("{mode}: {} stacks are not merged completely", run.trace().counter(Counter::StacksTruncated));
    }
}
