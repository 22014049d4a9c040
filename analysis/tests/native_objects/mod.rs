//! Objects made with the system's compilers, and how binutils and memtrace symbolize them.

#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use memtrace_analysis::symbols::{FunctionName, ObjectReport, Search, Symbols, build_id};
use memtrace_trace::file::{Budget, Definitions, Frame, Module, NativeFrame, StackNode};
use memtrace_trace::ids::{FrameId, ModuleId, StackId};

/// Name, file and line of each frame, innermost first.
pub(crate) type Frames = Vec<(String, String, u32)>;

/// A program with inlined functions, templates, lambdas and an anonymous namespace.
pub(crate) const CPP: &str = r#"
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>
namespace { __attribute__((noinline)) int hidden(int x) { return std::printf("%d\n", x); } }
namespace deep { namespace er {
template <typename T> struct Box {
    T value;
    template <typename F> T apply(F f) const { return f(value) + value; }
};
inline int twice(int x) { return hidden(x) * 2; }
inline int more(int x) { return twice(x) + twice(x + 1); }
}}
extern "C" __attribute__((noinline)) int work(const std::vector<int>& v) {
    std::vector<int> copy(v);
    std::sort(copy.begin(), copy.end(), [](int a, int b) { return (a ^ 5) < (b ^ 5); });
    deep::er::Box<long> box{std::accumulate(copy.begin(), copy.end(), 7L)};
    return (int)box.apply([&](long x) { return x + deep::er::more((int)x); });
}
int main(int argc, char**) { return work({argc, 2, 3}) + deep::er::more(argc); }
"#;

/// A C program with inlined functions.
pub(crate) const C: &str = r#"
#include <stdlib.h>
#include <string.h>
static inline __attribute__((always_inline)) int inner(const char* s) { return (int)strlen(s) + atoi(s); }
static inline __attribute__((always_inline)) int middle(const char* s) {
    int sum = 0;
    for (int i = 0; i < 3; i++)
        sum += inner(s + i);
    return sum;
}
__attribute__((noinline)) static int kept(const char* s) { return middle(s) * 3; }
int outer(const char* s) {
    return kept(s) +
           middle(s);
}
int main(int argc, char** argv) { return outer(argv[argc - 1]); }
"#;

/// A Rust program with inlined functions.
pub(crate) const RUST: &str = r#"
use std::collections::BTreeMap;
pub struct Counter { map: BTreeMap<u64, Vec<String>> }
impl Counter {
    #[inline(never)]
    pub fn add(&mut self, key: u64) { self.map.entry(key).or_default().push(format!("{key:?}")); }
}
#[unsafe(no_mangle)]
pub extern "C" fn count(n: u64) -> usize {
    let mut counter = Counter { map: BTreeMap::new() };
    (0..n).filter(|i| i % 3 == 0).for_each(|i| counter.add(i));
    counter.map.values().map(Vec::len).sum()
}
"#;

/// Runs a tool and returns its output. Panics if it fails.
pub(crate) fn tool(name: &str, arguments: &[&OsStr]) -> String {
    let output = Command::new(name).args(arguments).output().unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(output.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compiles a shared object from source text. The extension of `source_name` selects the compiler.
pub(crate) fn compile(folder: &Path, source_name: &str, text: &str, options: &[&str]) -> PathBuf {
    let source = folder.join(source_name);
    std::fs::write(&source, text).unwrap();
    let object = folder.join(format!("{source_name}{}.so", options.join("")));
    let compiler = match source_name.rsplit('.').next() {
        Some("rs") => "rustc",
        Some("cpp") => "g++",
        _ => "gcc",
    };
    let fixed: &[&str] = match compiler {
        "rustc" => &["--crate-type", "cdylib", "-O", "-g", "-C", "link-arg=-Wl,--build-id"],
        _ => &["-shared", "-fPIC", "-O2", "-g", "-Wl,--build-id"],
    };
    let words = fixed.iter().chain(options).map(OsStr::new);
    let words: Vec<&OsStr> = words.chain([source.as_os_str(), OsStr::new("-o"), object.as_os_str()]).collect();
    tool(compiler, &words);
    object
}

/// The functions that `nm` lists: address ranges and names, in order of address.
pub(crate) fn symbols(object: &Path) -> Vec<(Range<u64>, String)> {
    let listing = tool("nm", &["-S".as_ref(), "-n".as_ref(), "--defined-only".as_ref(), object.as_os_str()]);
    let mut all = Vec::new();
    for line in listing.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [start, size, kind, name] = words[..]
            && "tTwWi".contains(kind)
        {
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            all.push((number(start)..number(start) + number(size), name.to_owned()));
        }
    }
    all
}

/// Addresses in all these functions, every `step` bytes.
pub(crate) fn addresses(object: &Path, step: u64) -> Vec<u64> {
    let mut all: Vec<u64> = symbols(object).into_iter().flat_map(|(range, _)| range.step_by(step as usize)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The result of [`compare`].
#[derive(Debug, Default)]
pub(crate) struct Compared {
    /// Places with inlined functions.
    pub(crate) inlined: usize,
    /// All frames.
    pub(crate) frames: usize,
    /// Frames with the same name on both sides.
    pub(crate) named: usize,
    /// Frames with the same line but another file.
    pub(crate) other_files: usize,
}

/// Compares memtrace's frames for these addresses with those of binutils. Both must have the same number of frames and
/// the same lines. Names can differ only if one side uses the name of the symbol that contains the address. Files count
/// only if binutils knows the line.
#[track_caller]
pub(crate) fn compare(object: &Path, all: &[u64]) -> Compared {
    let (ours, report) = look_up(object, &id_of(object), all, &Search::default());
    assert_eq!(report.notes, Vec::<String>::new());
    let theirs = addr2line(object, all);
    let symbols = symbols(object);
    let mut compared = Compared::default();
    for address in all {
        let (ours, theirs) = (&ours[address], &theirs[address]);
        let shown = || format!("{}: {address:#x}\n ours   {ours:?}\n theirs {theirs:?}", object.display());
        assert_eq!(ours.len(), theirs.len(), "{}", shown());
        // A function can have several names at the same address.
        let before = symbols.partition_point(|(range, _)| range.start <= *address);
        let is_symbol = |name: &str| {
            let near = symbols[..before].iter().rev().take(64);
            let mut holding = near.filter(|(range, _)| range.contains(address));
            holding.any(|(_, raw)| FunctionName::of(raw).full == name)
        };
        for (i, (our, their)) in ours.iter().zip(theirs).enumerate() {
            compared.frames += 1;
            if our.0 == their.0 {
                compared.named += 1;
            } else {
                // DWARF does not always have a linkage name. Then binutils uses the symbol's name for the innermost
                // frame, inlined or not. We use it for the outermost frame, because the symbol belongs to it.
                let inlined = i == 0 && ours.len() > 1;
                let outermost = i + 1 == ours.len();
                assert!(inlined && is_symbol(&their.0) || outermost && is_symbol(&our.0), "{}", shown());
            }
            assert_eq!(our.2, their.2, "{}", shown());
            compared.other_files += usize::from(their.2 != 0 && normal(&our.1) != normal(&their.1));
        }
        compared.inlined += usize::from(ours.len() > 1);
    }
    compared
}

/// A canonical spelling of a path.
fn normal(path: &str) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}

/// The output of binutils' `addr2line -i -f`: linkage names, demangled by memtrace.
pub(crate) fn addr2line(object: &Path, addresses: &[u64]) -> BTreeMap<u64, Frames> {
    let input = tempfile::NamedTempFile::new().unwrap();
    let lines: Vec<String> = addresses.iter().map(|a| format!("{a:#x}\n")).collect();
    std::fs::write(input.path(), lines.concat()).unwrap();
    let output = Command::new("addr2line")
        .args(["-a", "-f", "-i", "-e"])
        .arg(object)
        .stdin(std::fs::File::open(input.path()).unwrap())
        .output()
        .expect("addr2line of binutils");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut all: BTreeMap<u64, Frames> = BTreeMap::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let address = u64::from_str_radix(line.trim_start_matches("0x"), 16).expect("an address");
        let frames = all.entry(address).or_default();
        while let Some(name) = lines.next_if(|line| !line.starts_with("0x0")) {
            let place = lines.next().expect("a place after each name");
            let place = place.split(" (discriminator").next().unwrap();
            let (file, line) = place.rsplit_once(':').expect("file:line");
            let name = if name == "??" { String::new() } else { FunctionName::of(name).full };
            let file = if file == "??" { "" } else { file };
            frames.push((name, file.to_owned(), line.parse().unwrap_or(0)));
        }
    }
    all
}

/// The definitions of a trace with one stack per return address. Each stack has one native frame.
pub(crate) fn definitions(path: &Path, build_id: &str, addresses: &[u64]) -> Definitions {
    let module = Module { path: path.to_str().unwrap().into(), build_id: build_id.into() };
    let mut all = Definitions {
        frames: vec![Frame::default()],
        stacks: vec![StackNode::default()],
        modules: vec![Module::default(), module],
        ..Definitions::default()
    };
    for (i, address) in addresses.iter().enumerate() {
        let id = FrameId(i as u32 + 1);
        all.native_frames.insert(id, NativeFrame { module: ModuleId(1), address: address + 1 });
        all.stacks.push(StackNode { parent: StackId::NONE, frame: id });
    }
    all
}

/// The frames of every stack of [`definitions`].
pub(crate) fn frames(definitions: &Definitions, addresses: &[u64]) -> BTreeMap<u64, Frames> {
    let of = |stack| {
        let frames = definitions.walk(StackId(stack)).map(|(_, frame)| frame.expect("every frame has a name"));
        frames.map(|f| (f.name.to_string(), f.filename.to_string(), f.line)).collect()
    };
    addresses.iter().enumerate().map(|(i, address)| (*address, of(i as u32 + 1))).collect()
}

/// memtrace's frames for these addresses (of instructions) of an object with this recorded build id.
pub(crate) fn look_up(
    path: &Path,
    build_id: &str,
    addresses: &[u64],
    search: &Search,
) -> (BTreeMap<u64, Frames>, ObjectReport) {
    let mut all = definitions(path, build_id, addresses);
    let mut symbols = Symbols::default();
    symbols.resolve_missing([&all], search, &Budget::default());
    symbols.symbolize(&mut all, &Budget::default());
    (frames(&all, addresses), symbols.report([&all]).remove(0))
}

/// The build id of an object; empty if it has none.
pub(crate) fn id_of(object: &Path) -> String {
    build_id(object).unwrap().unwrap_or_default()
}
