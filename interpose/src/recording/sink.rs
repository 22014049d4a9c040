//! Writes the definitions that captures deliver to the ring.

use memtrace_stackwalk::{DefinitionSink, FrameText, LoadedObject, Loss, ModuleCall};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId};
use memtrace_trace::shm::ring::Producer;

use super::emit::{define, truncate};
use super::observer;
use super::process::Process;
use crate::linker::mapped_object::{MappedObject, module_index};

/// Writes the definitions of new frames, stacks, modules and calls to the ring.
pub(super) struct RingSink<'a> {
    pub(super) process: &'a Process,
    pub(super) producer: &'a mut Producer<'static>,
}

impl RingSink<'_> {
    /// The id of the object with this index. Defines the module in the trace if it is new.
    pub(super) fn define_module(
        &mut self,
        object: &MappedObject,
        index: usize,
        build_id: impl FnOnce() -> Vec<u8>,
    ) -> ModuleId {
        let id = ModuleId(index as u32 + 1);
        if self.process.modules.mark_defined(index) {
            let path = object.path().to_string_lossy();
            let path = if path.is_empty() { executable_path() } else { path.into_owned() };
            let build_id: String = build_id().iter().map(|byte| format!("{byte:02x}")).collect();
            define(self.process, self.producer, &Definition::Module { id, path: &path, build_id: &build_id });
        }
        id
    }
}

fn executable_path() -> String {
    std::fs::read_link("/proc/self/exe").map(|p| p.to_string_lossy().into_owned()).unwrap_or_default()
}

impl DefinitionSink for RingSink<'_> {
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>) {
        let definition = Definition::Frame {
            id,
            name: truncate(self.process, text.name),
            qualname: truncate(self.process, text.qualname),
            filename: truncate(self.process, text.filename),
            line: text.line,
            first_line: text.first_line,
        };
        define(self.process, self.producer, &definition);
        observer::new_frame(id, text);
    }

    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId) {
        define(self.process, self.producer, &Definition::Stack { id, parent, frame });
    }

    fn module(&mut self, object: &LoadedObject<'_>) -> ModuleId {
        let object_at = MappedObject::new(object.start, object.path);
        let Some(index) = module_index(&object_at) else { return ModuleId::NONE };
        self.define_module(&object_at, index, || object.build_id.to_vec())
    }

    fn native_frame(&mut self, id: FrameId, module: ModuleId, address: u64) {
        define(self.process, self.producer, &Definition::NativeFrame { id, module, address });
    }

    #[inline]
    fn find_call(&mut self, call: ModuleCall, next: &mut u32) -> Option<ContextId> {
        self.process.module_calls.find(call, next)
    }

    fn add_call(&mut self, call: ModuleCall, class: &str) -> ContextId {
        let added = self.process.module_calls.add(call, || self.process.next_context());
        if added.is_new {
            let ModuleCall { caller, object, .. } = added.call;
            let object = object as u64;
            define(self.process, self.producer, &Definition::NnCall { id: added.id, caller, object, class });
            observer::new_module_call(&self.process.watch);
        }
        if added.call != call || added.id == call.caller {
            self.process.count(Counter::NnCallsMerged, 1);
        }
        added.id
    }

    fn module_layout_checked(&mut self, is_verified: bool) {
        let (status, text) = if is_verified {
            (NoticeStatus::Works, "verified: Module.__call__ was called on an nn.Module")
        } else {
            (NoticeStatus::Off, "frames not recognized: events do not name the nn.Module being called")
        };
        define(self.process, self.producer, &Definition::Notice { topic: "torch.modules", text, status });
    }

    fn lost(&mut self, loss: Loss) {
        let counter = match loss {
            Loss::Frame | Loss::Depth | Loss::Memory | Loss::Unverified | Loss::Unwinding | Loss::Merging => {
                Counter::StacksTruncated
            }
            Loss::Text => Counter::StringsTruncated,
        };
        self.process.count(counter, 1);
    }
}
