//! Generates stubs: machine code for functions that nobody wrote.
//!
//! A stub returns 0 and is counted. That suffices for most functions. But a function that returns a size or creates an
//! object must write its output, or the program reads garbage.
//!
//! A stub passes a record to `simcuda_stub` of its library (`simulate/src/stub.rs` reads it) and keeps all argument
//! registers: the number of outputs, for each its kind and argument, then the name and a NUL.

use crate::arch::{self, STUB_BYTES};

/// The output of a stub: the argument's number (from 0, floating-point arguments are not counted), and the type of the
/// 0, or a new handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// `*(int *)argument = 0`
    Int(u8),
    /// `*(size_t *)argument = 0`
    Size(u8),
    /// `*(void **)argument = a handle`
    Handle(u8),
}

use Output::{Handle, Int, Size};

/// Functions that write an output, with the numbers of the arguments (from 0).
///
/// A `?` in a name stands for one of the letters S, D, C, Z (the four element types). A `*` at its end stands for
/// anything.
const OUTPUTS: &[(&str, &[Output])] = &[
    ("cublas?gelsBatched", &[Int(9)]),
    ("cublas?geqrfBatched", &[Int(6)]),
    ("cudnnGetCTCLossWorkspaceSize_v8", &[Size(5)]),
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

impl Output {
    /// The kind and the argument, as in a record.
    fn encoded(self) -> [u8; 2] {
        match self {
            Int(argument) => [0, argument],
            Size(argument) => [1, argument],
            Handle(argument) => [2, argument],
        }
    }
}

/// A stub in the code of a library.
pub(crate) struct Stub<'a> {
    /// Its name.
    pub(crate) name: &'a str,
    /// Its address.
    pub(crate) address: u64,
    /// The size of its code in bytes.
    pub(crate) size: u64,
}

/// The code of stubs and their records, for an address, and the stubs. `target` is the address of `simcuda_stub`.
pub(crate) fn assemble<'a>(names: &[&'a str], address: u64, target: u64) -> (Vec<u8>, Vec<Stub<'a>>) {
    let mut code = Vec::new();
    let mut records = Vec::new();
    let mut stubs = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let start = number * STUB_BYTES;
        let record = names.len() * STUB_BYTES + records.len();
        let at = address + start as u64;
        code.extend(arch::stub(at, address + record as u64, target));
        let outputs = outputs(name);
        records.push(outputs.len() as u8);
        records.extend(outputs.iter().flat_map(|output| output.encoded()));
        records.extend(name.as_bytes());
        records.push(0);
        stubs.push(Stub { name, address: address + start as u64, size: STUB_BYTES as u64 });
    }
    code.extend(records);
    (code, stubs)
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
    fn code_and_records() {
        let (code, stubs) = assemble(&["cublasSgemm_v2", "cusparseSpSV_createDescr"], 0x5000, 0x1000);
        assert_eq!(stubs.iter().map(|stub| stub.address).collect::<Vec<_>>(), [0x5000, 0x5010]);
        assert_eq!(code[..16], arch::stub(0x5000, 0x5020, 0x1000));
        assert_eq!(code[16..32], arch::stub(0x5010, 0x5030, 0x1000));
        assert_eq!(code[32..], *b"\0cublasSgemm_v2\0\x01\x02\0cusparseSpSV_createDescr\0");
    }
}
