//! The Python modules that stand in for values which kernels would have computed (`simulate/python`).
//!
//! They are embedded, written beside the simulated libraries, and found through `PYTHONPATH`: Python imports
//! `sitecustomize` when it starts.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::ValueEnum;
use memtrace_trace::named;

/// The name under which `simcuda/exceptions.py` writes a call of `sys.exit` with the status of a failure.
pub(super) const EXIT: &str = "SystemExit";
/// The folder where processes write the exception that ended them, in that of files that are only needed during the
/// run.
pub(super) const EXCEPTIONS: &str = "exceptions";
/// The folder where processes write the lines at which values that nothing computed decided a size or a branch, in that
/// of files that are only needed during the run.
pub(super) const GUESSES: &str = "guesses";
/// The folder of the modules, in that of the simulated libraries. Reports take what is below such a folder for a
/// library.
pub(super) const FOLDER: &str = "site-packages";
/// The path in that folder and the text of each module.
pub(super) const MODULES: [(&str, &str); 11] = [
    ("sitecustomize.py", include_str!("../../../simulate/python/sitecustomize.py")),
    ("simcuda/__init__.py", include_str!("../../../simulate/python/simcuda/__init__.py")),
    ("simcuda/courses.py", include_str!("../../../simulate/python/simcuda/courses.py")),
    ("simcuda/exceptions.py", include_str!("../../../simulate/python/simcuda/exceptions.py")),
    ("simcuda/expressions.py", include_str!("../../../simulate/python/simcuda/expressions.py")),
    ("simcuda/guesses.py", include_str!("../../../simulate/python/simcuda/guesses.py")),
    ("simcuda/kernels.py", include_str!("../../../simulate/python/simcuda/kernels.py")),
    ("simcuda/libraries.py", include_str!("../../../simulate/python/simcuda/libraries.py")),
    ("simcuda/operators.py", include_str!("../../../simulate/python/simcuda/operators.py")),
    ("simcuda/steps.py", include_str!("../../../simulate/python/simcuda/steps.py")),
    ("simcuda/values.py", include_str!("../../../simulate/python/simcuda/values.py")),
];

named! {
    /// The share of a tensor's elements for which a comparison of values that nothing computed is true.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Debug, ValueEnum)]
    pub(crate) enum Nonzero {
        /// All elements: the most that a mask can select
        Full => "full",
        /// Every second one, and the others for the opposite comparison
        #[default]
        Half => "half",
        /// None
        Zero => "zero",
    }
}

named! {
    /// The workspace of a convolution of cuDNN that was not measured. Similar convolutions give a range.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Debug, ValueEnum)]
    pub(crate) enum Workspaces {
        /// That of the most similar convolution
        #[default]
        Likely => "likely",
        /// The smallest of the range
        Smallest => "smallest",
        /// The largest of the range
        Largest => "largest",
    }
}

/// How values that nothing computes are decided.
pub(super) struct Rules<'a> {
    pub(super) nonzero: Nonzero,
    /// How tokens choose experts, as `--routing` states it.
    pub(super) routing: &'a str,
    /// The number of optimizer steps after which the program ends.
    pub(super) steps: Option<u32>,
}

/// The variables of a run. `libraries` is the folder of the simulated libraries, `scratch` that of files that are only
/// needed during the run.
pub(super) fn environment(
    libraries: &Path,
    scratch: &Path,
    rules: &Rules<'_>,
) -> std::io::Result<Vec<(&'static str, OsString)>> {
    let [exceptions, guesses] = [EXCEPTIONS, GUESSES].map(|name| scratch.join(name));
    std::fs::create_dir_all(&exceptions)?;
    std::fs::create_dir_all(&guesses)?;
    let mut path = libraries.join(FOLDER).into_os_string();
    if let Some(own) = std::env::var_os("PYTHONPATH").filter(|own| !own.is_empty()) {
        path.push(OsStr::new(":"));
        path.push(own);
    }
    let mut variables = vec![
        ("PYTHONPATH", path),
        ("SIMCUDA_NONZERO", rules.nonzero.name().into()),
        ("SIMCUDA_ROUTING", rules.routing.into()),
        ("SIMCUDA_GUESSES", guesses.join("%p").into_os_string()),
        ("SIMCUDA_EXCEPTIONS", exceptions.into_os_string()),
    ];
    variables.extend(rules.steps.map(|steps| ("SIMCUDA_STEPS", steps.to_string().into())));
    Ok(variables)
}
