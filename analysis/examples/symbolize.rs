//! Names addresses of an object's code as a report would, for comparison with `addr2line -Cfi -e`:
//!
//! ```text
//! cargo run --release -p memtrace-analysis --example symbolize -- OBJECT < ADDRESSES
//! ```
//!
//! Addresses are those of instructions, in hexadecimal digits, one per line. The output has the address, then function
//! and file:line of every frame, innermost first.

#![expect(clippy::disallowed_macros, reason = "a tool for developers prints its results")]

use std::io::Read;
use std::path::Path;
use std::time::Instant;

use memtrace_analysis::symbols::{Search, Symbols, build_id};
use memtrace_trace::file::{Budget, Definitions, Frame, Module, NativeFrame, StackNode};
use memtrace_trace::ids::{FrameId, ModuleId, StackId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("OBJECT")?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let build_id = build_id(Path::new(&path))?.unwrap_or_default();
    let mut definitions = Definitions {
        frames: vec![Frame::default()],
        stacks: vec![StackNode::default()],
        modules: vec![Module::default(), Module { path: path.into(), build_id: build_id.into() }],
        ..Definitions::default()
    };
    for (i, line) in text.lines().enumerate() {
        let id = FrameId(i as u32 + 1);
        let address = u64::from_str_radix(line.trim().trim_start_matches("0x"), 16)? + 1;
        definitions.native_frames.insert(id, NativeFrame { module: ModuleId(1), address });
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: id });
    }
    let start = Instant::now();
    let mut symbols = Symbols::default();
    symbols.resolve_missing([&definitions], &Search::local_machine(), &Budget::default());
    let looked_up = start.elapsed();
    symbols.symbolize(&mut definitions, &Budget::default());
    let named = start.elapsed();
    for (i, line) in text.lines().enumerate() {
        println!("{}", line.trim());
        for (_, frame) in definitions.walk(StackId(i as u32 + 1)) {
            let frame = frame.ok_or("a frame without a name")?;
            println!("{}\n{}:{}", frame.name, frame.filename, frame.line);
        }
    }
    for object in symbols.report([&definitions]) {
        eprintln!("{object:#?}");
    }
    eprintln!("looked up in {:.1} ms, named in {:.1} ms", looked_up.as_secs_f64() * 1e3, named.as_secs_f64() * 1e3);
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        eprintln!(
            "{}",
            status.lines().filter(|l| l.starts_with("VmHWM") || l.starts_with("Rss")).collect::<Vec<_>>().join("  ")
        );
    }
    Ok(())
}
