//! `symbols.json` of a run folder, for a trace with native frames in three objects.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::{Folder, analyse};
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::{FrameId, ModuleId, StackId};

fn trace() -> Vec<u8> {
    let mut definitions = Vec::new();
    for (id, path, build_id) in [(1, "/nowhere/a.so", "0123"), (2, "/nowhere/b.so", ""), (3, "/nowhere/c", "ff")] {
        Definition::Module { id: ModuleId(id), path, build_id }.encode(&mut definitions);
    }
    for id in 1..=12 {
        let module = ModuleId(id % 4);
        Definition::NativeFrame { id: FrameId(id), module, address: 16 * u64::from(id) }.encode(&mut definitions);
        Definition::Stack { id: StackId(id), parent: StackId(id - 1), frame: FrameId(id) }.encode(&mut definitions);
    }
    let mut writer = Writer::new(Vec::new(), "{}").expect("memory");
    writer.definition(&definitions).expect("memory");
    let event =
        Event { seq: 1, size: 512, addr: 4096, device: 0, action: Action::Alloc, stack: StackId(12), ..Event::EMPTY };
    writer.event(&event).expect("memory");
    writer.finish(&End { reason: "exited".into(), ..End::default() }).expect("memory")
}

fuzz_target!(init: Folder::here().put("7.mtr", &trace()), |data: &[u8]| {
    let folder = Folder::here();
    folder.put("symbols.json", data);
    analyse(folder.path());
    let run = memtrace_analysis::open_run(folder.path()).expect("the trace is sound");
    let walked = run.processes()[0].definitions().walk(StackId(12)).count();
    assert!(walked >= 12, "every native frame is one at least");
});
