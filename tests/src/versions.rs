//! The releases of PyTorch and the versions of Python that `scripts/test all` runs.
//!
//! `scripts/test` installs the same pairs, and `tested-versions.json` has what came of them (`scripts/versions`).

use crate::traced_program::TracedProgram;

/// A release of PyTorch and a version of Python.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Versions {
    /// The release of PyTorch, such as `2.15.0`.
    pub torch: &'static str,
    /// The version of Python, such as `3.11`.
    pub python: &'static str,
}

impl Versions {
    /// Those of `scripts/venv`.
    pub const DEFAULT: Versions = Versions { torch: "", python: "" };

    /// The release that `scripts/gpu-check` ran on GPUs. `scripts/test` runs a sample of the tests with it.
    pub const ON_GPUS: Versions = Versions { torch: "2.11.0", python: "3.11" };

    /// A free-threaded build of CPython, of which only stacks are read.
    pub const FREE_THREADED: Versions = Versions { torch: "2.15.0", python: "3.14t" };

    /// This release exports no symbol by which memtrace could find the allocator's tracker.
    pub const REPORTER_ONLY: Versions = Versions { torch: "2.1.2", python: "3.11" };
}

impl TracedProgram {
    /// Runs the program with these versions.
    #[must_use]
    pub fn on(self, versions: Versions) -> TracedProgram {
        if versions == Versions::DEFAULT {
            return self;
        }
        self.env("SIM_TORCH", versions.torch).env("SIM_PYTHON", versions.python)
    }
}

/// `for_each_version! { mod NAME: check }` makes a module with one test `check(Versions)` per pair of versions whose
/// allocator can be tracked.
#[macro_export]
macro_rules! for_each_version {
    ($($rest:tt)*) => {
        $crate::versions_of_tests! { { $($rest)* }
            pytorch_2_4_1_on_python_3_8: "2.4.1" "3.8";
            pytorch_2_4_1_on_python_3_10: "2.4.1" "3.10";
            pytorch_2_4_1_on_python_3_11: "2.4.1" "3.11";
            pytorch_2_7_1_on_python_3_11: "2.7.1" "3.11";
            pytorch_2_11_0_on_python_3_11: "2.11.0" "3.11";
            pytorch_2_11_0_on_python_3_12: "2.11.0" "3.12";
            pytorch_2_11_0_on_python_3_13: "2.11.0" "3.13";
            pytorch_2_11_0_on_python_3_14: "2.11.0" "3.14";
            pytorch_2_12_1_on_python_3_11: "2.12.1" "3.11";
            pytorch_2_13_0_on_python_3_11: "2.13.0" "3.11";
            pytorch_2_14_1_on_python_3_11: "2.14.1" "3.11";
            pytorch_2_15_0_on_python_3_11: "2.15.0" "3.11";
            pytorch_2_15_0_on_python_3_15: "2.15.0" "3.15";
        }
    };
}

/// The two uses of the list in [`for_each_version`].
#[doc(hidden)]
#[macro_export]
macro_rules! versions_of_tests {
    ({ mod $module:ident: $check:path } $($name:ident: $torch:literal $python:literal;)*) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $name() {
                    $check($crate::versions::Versions { torch: $torch, python: $python });
                }
            )*
        }
    };
    ({ const } $($name:ident: $torch:literal $python:literal;)*) => {
        &[$($crate::versions::Versions { torch: $torch, python: $python }),*]
    };
}

/// All pairs whose allocator can be tracked.
pub const TRACKED: &[Versions] = for_each_version! { const };
