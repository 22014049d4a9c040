//! Generates the C text that is linked with the archives: stubs, the driver's table of names, the runtime's version.
//!
//! A stub returns 0 and is counted. That suffices for most functions. But a function that returns a size or creates an
//! object must write its output, or the program reads garbage.

use std::fmt::Write as _;

/// What a stub writes: the argument's number (from 0), and the type of the 0, or a new handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// `*(int *)argument = 0`
    Int(usize),
    /// `*(size_t *)argument = 0`
    Size(usize),
    /// `*(void **)argument = a handle`
    Handle(usize),
}

/// The maximum number of integer arguments before an output. Floating-point arguments use other registers and are not
/// counted.
const ARGUMENTS: usize = 20;

use Output::{Handle, Int, Size};

/// Functions that write an output, with the numbers of the arguments (from 0).
///
/// A `?` in a name stands for one of the letters S, D, C, Z (the four element types). A `*` at its end stands for
/// anything.
const OUTPUTS: &[(&str, &[Output])] = &[
    ("cudnnGetCTCLossWorkspaceSize_v8", &[Size(5)]),
    ("cudnnGetRNNTempSpaceSizes", &[Size(4), Size(5)]),
    ("cudnnGetRNNWeightSpaceSize", &[Size(2)]),
    ("cusolverDn?geqrf_bufferSize", &[Int(5)]),
    ("cusolverDn?gesvd_bufferSize", &[Int(3)]),
    ("cusolverDn?gesvdaStridedBatched_bufferSize", &[Int(16)]),
    ("cusolverDn?gesvdjBatched_bufferSize", &[Int(11)]),
    ("cusolverDn?gesvdj_bufferSize", &[Int(12)]),
    ("cusolverDn?getrf_bufferSize", &[Int(5)]),
    ("cusolverDn?heevd_bufferSize", &[Int(7)]),
    ("cusolverDn?heevjBatched_bufferSize", &[Int(7)]),
    ("cusolverDn?heevj_bufferSize", &[Int(7)]),
    ("cusolverDn?orgqr_bufferSize", &[Int(7)]),
    ("cusolverDn?ormqr_bufferSize", &[Int(11)]),
    ("cusolverDn?potrf_bufferSize", &[Int(5)]),
    ("cusolverDn?syevd_bufferSize", &[Int(7)]),
    ("cusolverDn?syevjBatched_bufferSize", &[Int(7)]),
    ("cusolverDn?syevj_bufferSize", &[Int(7)]),
    ("cusolverDn?sytrf_bufferSize", &[Int(4)]),
    ("cusolverDn?ungqr_bufferSize", &[Int(7)]),
    ("cusolverDn?unmqr_bufferSize", &[Int(11)]),
    ("cusolverDnXgeev_bufferSize", &[Size(17), Size(18)]),
    ("cusolverDnXgeqrf_bufferSize", &[Size(10), Size(11)]),
    ("cusolverDnXpotrf_bufferSize", &[Size(8), Size(9)]),
    ("cusolverDnXsyevBatched_bufferSize", &[Size(11), Size(12)]),
    ("cusolverDnXsyevd_bufferSize", &[Size(11), Size(12)]),
    ("cusolverDnXsytrs_bufferSize", &[Size(11), Size(12)]),
    ("cusolverDnCreate*", &[Handle(0)]),
    ("cusparse?bsrsm2_bufferSize", &[Int(13)]),
    ("cusparse?bsrsv2_bufferSize", &[Int(11)]),
    ("cusparse?csrgeam2_bufferSizeExt", &[Size(19)]),
    ("cusparseSDDMM_bufferSize", &[Size(10)]),
    ("cusparseSpGEMM_compute", &[Size(11)]),
    ("cusparseSpGEMM_workEstimation", &[Size(11)]),
    ("cusparseSpMM_bufferSize", &[Size(10)]),
    ("cusparseSpMV_bufferSize", &[Size(9)]),
    ("cusparseSpMatGetSize", &[Size(1), Size(2), Size(3)]),
    ("cusparseSpSM_bufferSize", &[Size(10)]),
    ("cusparseSpSV_bufferSize", &[Size(9)]),
    ("cusparseXcoosort_bufferSizeExt", &[Size(6)]),
    ("cusparseXcsrsort_bufferSizeExt", &[Size(6)]),
    ("cusparseCreateIdentityPermutation", &[]),
    ("cusparseCreate*", &[Handle(0)]),
    ("cusparseSpGEMM_createDescr", &[Handle(0)]),
    ("cusparseSpSM_createDescr", &[Handle(0)]),
    ("cusparseSpSV_createDescr", &[Handle(0)]),
    ("cusparseLtMatmulGetWorkspace", &[Size(2)]),
    ("cusparseLtSpMMACompressedSize2", &[Size(2), Size(3)]),
];

fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, open) = match pattern.strip_suffix('*') {
        Some(beginning) => (beginning, true),
        None => (pattern, false),
    };
    (name.len() == pattern.len() || open && name.len() > pattern.len())
        && pattern.bytes().zip(name.bytes()).all(|(p, n)| p == n || p == b'?' && b"SDCZ".contains(&n))
}

/// The outputs of a function: those of the first entry that matches its name.
fn outputs(name: &str) -> &'static [Output] {
    OUTPUTS.iter().find(|(pattern, _)| matches(pattern, name)).map_or(&[], |(_, outputs)| outputs)
}

/// The C text of the stubs. It needs `simcuda_stub`, and `simcuda_handle` where a stub creates a handle.
pub(crate) fn stubs<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let mut text = String::from("#include <stddef.h>\nvoid simcuda_stub(const char *);\nvoid *simcuda_handle(void);\n");
    for name in names {
        let outputs = outputs(name);
        let arguments = if outputs.is_empty() {
            "void".to_string()
        } else {
            (0..ARGUMENTS).map(|i| format!("void *a{i}")).collect::<Vec<_>>().join(", ")
        };
        let _ = write!(text, "long {name}({arguments}) {{ simcuda_stub(\"{name}\");");
        for output in outputs {
            let _ = match output {
                Output::Int(i) => write!(text, " if (a{i}) *(int *)a{i} = 0;"),
                Output::Size(i) => write!(text, " if (a{i}) *(size_t *)a{i} = 0;"),
                Output::Handle(i) => write!(text, " if (a{i}) *(void **)a{i} = simcuda_handle();"),
            };
        }
        text.push_str(" return 0; }\n");
    }
    text
}

/// The C text of the table that `cuGetProcAddress` searches.
pub(crate) fn entries<'a>(names: impl Iterator<Item = &'a String> + Clone) -> String {
    let mut text = String::from("#include <stddef.h>\n");
    for name in names.clone() {
        let _ = writeln!(text, "void {name}(void);");
    }
    text.push_str("const struct { const char *name; void (*address)(void); } simcuda_entries[] = {\n");
    for name in names.clone() {
        let _ = writeln!(text, "  {{\"{name}\", {name}}},");
    }
    let _ = writeln!(text, "}};\nconst size_t simcuda_entry_count = {};", names.count());
    text
}

/// The C text of the runtime's version.
pub(crate) fn runtime_version(version: u32) -> String {
    format!("const int simcuda_cudart_version = {version};\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_by_pattern() {
        assert_eq!(outputs("cusolverDnZgesvd_bufferSize"), [Int(3)]);
        assert_eq!(outputs("cusolverDnXgesvd_bufferSize"), []);
        assert_eq!(outputs("cusparseCreateCsr"), [Handle(0)]);
        assert_eq!(outputs("cusparseCreateIdentityPermutation"), []);
        assert_eq!(outputs("cublasSgemm_v2"), []);
    }

    #[test]
    fn a_stub_writes_its_outputs() {
        let names = ["cublasSgemm_v2".to_string(), "cusparseSpSV_createDescr".to_string()];
        let text = stubs(names.iter());
        assert!(text.contains("long cublasSgemm_v2(void) { simcuda_stub(\"cublasSgemm_v2\"); return 0; }"));
        assert!(text.contains("if (a0) *(void **)a0 = simcuda_handle(); return 0; }"));
    }
}
