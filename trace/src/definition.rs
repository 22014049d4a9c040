//! Definitions: the meaning of the ids in events. The ring and the trace file contain the same bytes.
//!
//! A definition may follow the first event that uses it and may occur twice. It is never revoked.

use crate::error::{Error, Result};
use crate::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use crate::rotation::{EarlierBlock, Rotation};
use crate::wire::{Cursor, put_str, put_varint};

/// The longest encoded definition, in bytes. Longer strings are cut and counted before encoding.
pub const MAX_DEFINITION: usize = 16 * 1024;

/// Whether the part of memtrace that a notice describes works.
#[derive(Clone, Copy, PartialEq, Hash, Eq, Default, Debug)]
#[repr(u8)]
pub enum NoticeStatus {
    /// Neither of the others. Notices of files before 1.1 have this value.
    #[default]
    Remark = 0,
    /// This part works here: its assumptions were checked against an independent source.
    Works = 1,
    /// This part is switched off in this process. The text has the reason.
    Off = 2,
}

impl NoticeStatus {
    /// The name in `run.json` and `summary.json`.
    pub const fn name(self) -> &'static str {
        match self {
            NoticeStatus::Remark => "remark",
            NoticeStatus::Works => "works",
            NoticeStatus::Off => "off",
        }
    }

    /// The status with this number. A number of a newer build is a remark.
    const fn from_wire(number: u64) -> NoticeStatus {
        match number {
            1 => NoticeStatus::Works,
            2 => NoticeStatus::Off,
            _ => NoticeStatus::Remark,
        }
    }
}

/// The role of a named tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum TensorKind {
    /// Anything else, including roles of a newer build.
    Other = 0,
    /// A parameter of a module.
    Parameter = 1,
    /// A buffer of a module.
    Buffer = 2,
    /// The `.grad` of a parameter.
    Gradient = 3,
    /// The state that an optimizer keeps for a parameter.
    OptimizerState = 4,
}

impl TensorKind {
    const fn from_wire(number: u64) -> TensorKind {
        match number {
            1 => TensorKind::Parameter,
            2 => TensorKind::Buffer,
            3 => TensorKind::Gradient,
            4 => TensorKind::OptimizerState,
            _ => TensorKind::Other,
        }
    }
}

/// Why the program's objects were examined for what holds tensors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(u8)]
pub enum ScanOccasion {
    /// While the program ran. Also stands for occasions of a newer build.
    #[default]
    Running = 0,
    /// After an allocation had failed.
    OutOfMemory = 1,
    /// Before the interpreter ended.
    End = 2,
}

impl ScanOccasion {
    const fn from_wire(number: u64) -> ScanOccasion {
        match number {
            1 => ScanOccasion::OutOfMemory,
            2 => ScanOccasion::End,
            _ => ScanOccasion::Running,
        }
    }
}

/// The topic of the notice that the program has an optimizer.
pub const TRAINING_TOPIC: &str = "torch.training";

/// The end of the path of a [`Definition::Holder`] whose memory the autograd graph of a tensor holds.
pub const GRAPH_HOLDER: &str = " (its autograd graph)";

/// The API with which a program named a range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(u8)]
pub enum LabelOrigin {
    /// `torch.profiler.record_function`, which PyTorch itself uses too. Also stands for APIs of a newer build.
    #[default]
    RecordFunction = 0,
    /// NVTX.
    Nvtx = 1,
    /// `gpu_memtrace.annotate`.
    Annotation = 2,
}

impl LabelOrigin {
    const fn from_wire(number: u64) -> LabelOrigin {
        match number {
            1 => LabelOrigin::Nvtx,
            2 => LabelOrigin::Annotation,
            _ => LabelOrigin::RecordFunction,
        }
    }

    /// The name of the API in reports.
    pub const fn name(self) -> &'static str {
        match self {
            LabelOrigin::RecordFunction => "record_function",
            LabelOrigin::Nvtx => "nvtx",
            LabelOrigin::Annotation => "annotate",
        }
    }

    /// Whether the end of a range has its label. Otherwise the start with the same number, or the innermost one of the
    /// thread, has it.
    pub const fn end_has_label(self) -> bool {
        matches!(self, LabelOrigin::RecordFunction)
    }
}

/// One definition. It borrows from the bytes that it was decoded from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Definition<'a> {
    /// One line of one function.
    Frame {
        /// The id being defined.
        id: FrameId,
        /// The function's name, as a traceback prints it (`co_name`).
        name: &'a str,
        /// The qualified name (`co_qualname`) if the interpreter has it, otherwise the name.
        qualname: &'a str,
        /// The file name in the code object.
        filename: &'a str,
        /// The line, 0 if unknown.
        line: u32,
        /// The first line of the function, 0 if unknown.
        first_line: u32,
    },
    /// A stack: `frame`, called from `parent`.
    Stack {
        /// The id being defined.
        id: StackId,
        /// The caller's stack. `NONE` if `frame` is the outermost.
        parent: StackId,
        /// The innermost frame.
        frame: FrameId,
    },
    /// An autograd node that runs.
    Context {
        /// The id being defined.
        id: ContextId,
        /// The node's C++ type without the namespaces of PyTorch, for example `ConvolutionBackward0`.
        node: &'a str,
        /// The Python stack of the forward call that created the node. `NONE` if unknown.
        forward: StackId,
        /// The `nn.Module` whose call created the node ([`Definition::NnCall`]). `NONE` if unknown. Since 1.2.
        module: ContextId,
    },
    /// A call of an `nn.Module`. It shares the ids of [`Definition::Context`]: events outside backward have such a
    /// context. Since 1.2.
    NnCall {
        /// The id being defined.
        id: ContextId,
        /// The call that contains this one. `NONE` for an outermost call. Smaller than `id`.
        caller: ContextId,
        /// The address of the module's Python object.
        object: u64,
        /// The name of its class.
        class: &'a str,
    },
    /// The name of an `nn.Module` in the model that contains it. Since 1.2.
    NnName {
        /// The address of the module's Python object.
        object: u64,
        /// The number of events when the name was read. The name is valid for calls around that event.
        seq: u64,
        /// The name of its class.
        class: &'a str,
        /// The path as in `named_modules()`, for example `layer1.0.conv1`. Empty for the model itself.
        name: &'a str,
    },
    /// A name of a tensor's memory. Memory that several tensors share has several names. Since 1.2.
    TensorName {
        /// The address at which the storage begins.
        address: u64,
        /// The number of events when the name was read. It names the block that was at the address then.
        seq: u64,
        /// The tensor's role.
        kind: TensorKind,
        /// For example `layer1.0.conv1.weight`, `layer1.0.conv1.weight.grad`, `Adam.exp_avg of layer1.0.conv1.weight`.
        name: &'a str,
        /// Data type and shape, for example `float32[64, 3, 7, 7]`. Empty if unknown.
        shape: &'a str,
    },
    /// A name that the program gave to a range. Since 1.2.
    Label {
        /// The id used in events.
        id: u32,
        /// The API that the program used.
        origin: LabelOrigin,
        /// The name.
        text: &'a str,
    },
    /// A reference cycle that held a tensor's memory until the cyclic garbage collector ran (`--cycles`). There is one
    /// definition for each tensor's memory. Since 1.2.
    Cycle {
        /// The address at which the tensor's storage begins, 0 if unknown.
        address: u64,
        /// The number of events when the cycle was read. It held the block that was at the address then.
        seq: u64,
        /// The file in the run's folder that shows the objects. Empty if there is none.
        file: &'a str,
        /// The cycle in one line, for example `Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor
        /// float32[1024, 1024]`.
        text: &'a str,
    },
    /// One examination of the program's objects for what holds tensors (`--holders`). Its [`Definition::Holder`]s precede
    /// it and have the same `seq`. Since 1.2.
    HolderScan {
        /// The number of events at that time.
        seq: u64,
        /// The occasion.
        occasion: ScanOccasion,
        /// How many objects were visited.
        objects: u64,
        /// Whether objects were left out because there are too many.
        is_partial: bool,
    },
    /// The Python path that holds a tensor's memory (`--holders`). It is valid from this scan on, until the block is
    /// freed or another definition for the address follows. Since 1.2.
    Holder {
        /// The address at which the tensor's storage begins.
        address: u64,
        /// The number of events when the path was read. It held the block that was at the address then.
        seq: u64,
        /// For example `__main__.history[37]` or `frame validate: preds`. Ends with [`GRAPH_HOLDER`] if the autograd
        /// graph of the tensor at the path holds the memory. Empty if no path holds the memory any more.
        path: &'a str,
        /// Data type and shape of the tensor at the path, for example `int64[8, 1900]`. Empty if unknown.
        shape: &'a str,
    },
    /// A loaded object.
    Module {
        /// The id being defined.
        id: ModuleId,
        /// Its path as the loader has it. For the executable, the target of `/proc/self/exe`.
        path: &'a str,
        /// Its GNU build id in lowercase hexadecimal digits. Empty if it has none.
        build_id: &'a str,
    },
    /// A thread.
    Thread {
        /// The id being defined.
        id: ThreadId,
        /// The kernel's thread id.
        tid: u32,
        /// The kernel's name for it (`comm`).
        name: &'a str,
    },
    /// A private memory pool (of a CUDA graph or a `MemPool`). The id 0, the default pool, is defined if events carry
    /// their pools.
    Pool {
        /// The id used in events.
        id: u16,
        /// PyTorch's `MempoolId_t`.
        pool: (u64, u64),
    },
    /// A GPU.
    Device {
        /// The ordinal that the process uses.
        ordinal: u32,
        /// Its marketing name.
        name: &'a str,
        /// Its total memory in bytes.
        total: u64,
        /// The bytes in use when the process first allocated on it (`cuMemGetInfo`, this process's context included).
        used_before: u64,
        /// The PCI bus id, for example `0000:17:00.0`.
        pci: &'a str,
    },
    /// A frame of native code. It shares the ids of [`Definition::Frame`] and occurs in stacks in the same way.
    NativeFrame {
        /// The id being defined.
        id: FrameId,
        /// The object that contains the code. `NONE` for code in no loaded object (generated at run time).
        module: ModuleId,
        /// The return address as an ELF virtual address of the object's file, which is the run-time address minus the
        /// load bias. Without a module it is the run-time address. The call is the instruction before it.
        address: u64,
    },
    /// A line of the program from which `torch.compile` generated a frame's line. PyTorch lists it as the frame's
    /// caller, and so does memtrace.
    FrameOrigin {
        /// The frame in the generated file.
        frame: FrameId,
        /// The position among the frame's origins. 0 is next to the frame, 1 follows 0, and so on.
        position: u32,
        /// The function's name.
        name: &'a str,
        /// The file's name.
        filename: &'a str,
        /// The line.
        line: u32,
    },
    /// The process's rank in a distributed job, as the program gave it to PyTorch
    /// (`torch.distributed.init_process_group`).
    Rank {
        /// Its rank.
        rank: u32,
        /// The number of ranks.
        size: u32,
    },
    /// What a part of memtrace did or could not do.
    Notice {
        /// The part, for example `torch.tracker`.
        topic: &'a str,
        /// A sentence about it.
        text: &'a str,
        /// Whether the part works.
        status: NoticeStatus,
    },
    /// The trace was rotated (`--keep`): where its kept events begin. Since 1.5.
    Rotation(Rotation<&'a str>),
    /// What was known about a block that is older than the kept events. Since 1.5.
    EarlierBlock(EarlierBlock<&'a str>),
}

mod kind {
    pub(super) const FRAME: u8 = 1;
    pub(super) const STACK: u8 = 2;
    pub(super) const CONTEXT: u8 = 3;
    pub(super) const MODULE: u8 = 4;
    pub(super) const THREAD: u8 = 5;
    pub(super) const POOL: u8 = 6;
    pub(super) const DEVICE: u8 = 7;
    pub(super) const NOTICE: u8 = 8;
    pub(super) const NATIVE_FRAME: u8 = 9;
    pub(super) const RANK: u8 = 10;
    pub(super) const FRAME_ORIGIN: u8 = 11;
    pub(super) const NN_CALL: u8 = 12;
    pub(super) const NN_NAME: u8 = 13;
    pub(super) const TENSOR_NAME: u8 = 14;
    pub(super) const LABEL: u8 = 15;
    pub(super) const CYCLE: u8 = 16;
    pub(super) const HOLDER_SCAN: u8 = 17;
    pub(super) const HOLDER: u8 = 18;
    pub(super) const ROTATION: u8 = 27;
    pub(super) const EARLIER_BLOCK: u8 = 28;
}

impl<'a> Definition<'a> {
    /// Appends the encoding: kind (1 byte), length of the rest (varint), then the fields in order of declaration.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut body = Vec::with_capacity(64);
        let kind = self.encode_body(&mut body);
        out.push(kind);
        put_varint(out, body.len() as u64);
        out.extend_from_slice(&body);
    }

    fn encode_body(&self, out: &mut Vec<u8>) -> u8 {
        match *self {
            Definition::Rotation(ref rotation) => {
                rotation.encode(out);
                kind::ROTATION
            }
            Definition::EarlierBlock(ref block) => {
                block.encode(out);
                kind::EARLIER_BLOCK
            }
            Definition::Frame { id, name, qualname, filename, line, first_line } => {
                put_varint(out, id.0.into());
                put_str(out, name);
                put_str(out, qualname);
                put_str(out, filename);
                put_varint(out, line.into());
                put_varint(out, first_line.into());
                kind::FRAME
            }
            Definition::Stack { id, parent, frame } => {
                put_varint(out, id.0.into());
                put_varint(out, parent.0.into());
                put_varint(out, frame.0.into());
                kind::STACK
            }
            Definition::Context { id, node, forward, module } => {
                put_varint(out, id.0.into());
                put_str(out, node);
                put_varint(out, forward.0.into());
                put_varint(out, module.0.into());
                kind::CONTEXT
            }
            Definition::NnCall { id, caller, object, class } => {
                put_varint(out, id.0.into());
                put_varint(out, caller.0.into());
                put_varint(out, object);
                put_str(out, class);
                kind::NN_CALL
            }
            Definition::NnName { object, seq, class, name } => {
                put_varint(out, object);
                put_varint(out, seq);
                put_str(out, class);
                put_str(out, name);
                kind::NN_NAME
            }
            Definition::TensorName { address, seq, kind, name, shape } => {
                put_varint(out, address);
                put_varint(out, seq);
                put_varint(out, kind as u64);
                put_str(out, name);
                put_str(out, shape);
                kind::TENSOR_NAME
            }
            Definition::Label { id, origin, text } => {
                put_varint(out, id.into());
                put_varint(out, origin as u64);
                put_str(out, text);
                kind::LABEL
            }
            Definition::Cycle { address, seq, file, text } => {
                put_varint(out, address);
                put_varint(out, seq);
                put_str(out, file);
                put_str(out, text);
                kind::CYCLE
            }
            Definition::HolderScan { seq, occasion, objects, is_partial } => {
                put_varint(out, seq);
                put_varint(out, occasion as u64);
                put_varint(out, objects);
                put_varint(out, is_partial.into());
                kind::HOLDER_SCAN
            }
            Definition::Holder { address, seq, path, shape } => {
                put_varint(out, address);
                put_varint(out, seq);
                put_str(out, path);
                put_str(out, shape);
                kind::HOLDER
            }
            Definition::Module { id, path, build_id } => {
                put_varint(out, id.0.into());
                put_str(out, path);
                put_str(out, build_id);
                kind::MODULE
            }
            Definition::Thread { id, tid, name } => {
                put_varint(out, id.0.into());
                put_varint(out, tid.into());
                put_str(out, name);
                kind::THREAD
            }
            Definition::Pool { id, pool } => {
                put_varint(out, id.into());
                put_varint(out, pool.0);
                put_varint(out, pool.1);
                kind::POOL
            }
            Definition::Device { ordinal, name, total, used_before, pci } => {
                put_varint(out, ordinal.into());
                put_str(out, name);
                put_varint(out, total);
                put_varint(out, used_before);
                put_str(out, pci);
                kind::DEVICE
            }
            Definition::NativeFrame { id, module, address } => {
                put_varint(out, id.0.into());
                put_varint(out, module.0.into());
                put_varint(out, address);
                kind::NATIVE_FRAME
            }
            Definition::FrameOrigin { frame, position, name, filename, line } => {
                put_varint(out, frame.0.into());
                put_varint(out, position.into());
                put_str(out, name);
                put_str(out, filename);
                put_varint(out, line.into());
                kind::FRAME_ORIGIN
            }
            Definition::Rank { rank, size } => {
                put_varint(out, rank.into());
                put_varint(out, size.into());
                kind::RANK
            }
            Definition::Notice { topic, text, status } => {
                put_str(out, topic);
                put_str(out, text);
                put_varint(out, status as u64);
                kind::NOTICE
            }
        }
    }

    /// Decodes one definition. `Ok(None)` is an unknown kind, which is skipped. The error is [`Error::Malformed`].
    ///
    /// Bytes after the known fields of a kind belong to a newer minor version and are ignored.
    pub fn decode(cursor: &mut Cursor<'a>) -> Result<Option<Definition<'a>>> {
        let kind = cursor.byte()?;
        let len = usize::try_from(cursor.varint()?).map_err(|_| Error::Malformed { what: "definition length" })?;
        let mut c = Cursor::new(cursor.bytes(len)?);
        Ok(Some(match kind {
            kind::FRAME => Definition::Frame {
                id: FrameId(c.varint32()?),
                name: c.str()?,
                qualname: c.str()?,
                filename: c.str()?,
                line: c.varint32()?,
                first_line: c.varint32()?,
            },
            kind::STACK => Definition::Stack {
                id: StackId(c.varint32()?),
                parent: StackId(c.varint32()?),
                frame: FrameId(c.varint32()?),
            },
            kind::CONTEXT => {
                let (id, node, forward) = (ContextId(c.varint32()?), c.str()?, StackId(c.varint32()?));
                // The definition ends here in files before 1.2.
                let module = if c.is_empty() { ContextId::NONE } else { ContextId(c.varint32()?) };
                Definition::Context { id, node, forward, module }
            }
            kind::MODULE => Definition::Module {
                id: ModuleId(c.varint32()?),
                path: c.str()?,
                // The definition ends here in files without native stacks.
                build_id: if c.is_empty() { "" } else { c.str()? },
            },
            kind::THREAD => Definition::Thread { id: ThreadId(c.varint32()?), tid: c.varint32()?, name: c.str()? },
            kind::POOL => Definition::Pool {
                id: u16::try_from(c.varint()?).map_err(|_| Error::Malformed { what: "pool id" })?,
                pool: (c.varint()?, c.varint()?),
            },
            kind::DEVICE => Definition::Device {
                ordinal: c.varint32()?,
                name: c.str()?,
                total: c.varint()?,
                used_before: c.varint()?,
                pci: c.str()?,
            },
            kind::NATIVE_FRAME => Definition::NativeFrame {
                id: FrameId(c.varint32()?),
                module: ModuleId(c.varint32()?),
                address: c.varint()?,
            },
            kind::FRAME_ORIGIN => Definition::FrameOrigin {
                frame: FrameId(c.varint32()?),
                position: c.varint32()?,
                name: c.str()?,
                filename: c.str()?,
                line: c.varint32()?,
            },
            kind::NN_CALL => Definition::NnCall {
                id: ContextId(c.varint32()?),
                caller: ContextId(c.varint32()?),
                object: c.varint()?,
                class: c.str()?,
            },
            kind::NN_NAME => {
                Definition::NnName { object: c.varint()?, seq: c.varint()?, class: c.str()?, name: c.str()? }
            }
            kind::TENSOR_NAME => Definition::TensorName {
                address: c.varint()?,
                seq: c.varint()?,
                kind: TensorKind::from_wire(c.varint()?),
                name: c.str()?,
                shape: c.str()?,
            },
            kind::LABEL => {
                Definition::Label { id: c.varint32()?, origin: LabelOrigin::from_wire(c.varint()?), text: c.str()? }
            }
            kind::CYCLE => Definition::Cycle { address: c.varint()?, seq: c.varint()?, file: c.str()?, text: c.str()? },
            kind::HOLDER_SCAN => Definition::HolderScan {
                seq: c.varint()?,
                occasion: ScanOccasion::from_wire(c.varint()?),
                objects: c.varint()?,
                is_partial: c.varint()? != 0,
            },
            kind::HOLDER => Definition::Holder {
                address: c.varint()?,
                seq: c.varint()?,
                path: c.str()?,
                // Not all files of version 1.2 have a shape.
                shape: if c.is_empty() { "" } else { c.str()? },
            },
            kind::RANK => Definition::Rank { rank: c.varint32()?, size: c.varint32()? },
            kind::NOTICE => Definition::Notice {
                topic: c.str()?,
                text: c.str()?,
                // The definition ends here in files of version 1.0.
                status: if c.is_empty() { NoticeStatus::Remark } else { NoticeStatus::from_wire(c.varint()?) },
            },
            kind::ROTATION => Definition::Rotation(Rotation::decode(&mut c)?),
            kind::EARLIER_BLOCK => Definition::EarlierBlock(EarlierBlock::decode(&mut c)?),
            _ => return Ok(None),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rotation::{Circumstances, Progress};
    use proptest::prelude::*;

    fn rotation() -> Rotation<&'static str> {
        let progress =
            Progress { step: Some(7), phase: "forward", phase_changes: 30, backward_passes: 8, optimizer_steps: 7 };
        let circumstances = Circumstances {
            main_thread: ThreadId(2),
            bits: 5,
            backward_passes_in_step: 1,
            backward_passes_of_first_step: Some(0),
            optimizer_steps_seen: 7,
        };
        Rotation {
            first_seq: 1 << 40,
            dropped: 1 << 39,
            recreating: 300,
            dropped_ticks: (1 << 50, 1 << 51),
            progress,
            ended_steps: 7,
            circumstances,
        }
    }

    #[test]
    fn every_kind_round_trips() {
        let all = [
            Definition::Frame { id: FrameId(1), name: "f", qualname: "A.f", filename: "ü.py", line: 7, first_line: 3 },
            Definition::Stack { id: StackId(9), parent: StackId(8), frame: FrameId(1) },
            Definition::Context { id: ContextId(2), node: "MmBackward0", forward: StackId(9), module: ContextId(1) },
            Definition::NnCall { id: ContextId(3), caller: ContextId(1), object: 1 << 46, class: "Linear" },
            Definition::NnName { object: 1 << 46, seq: 77, class: "Linear", name: "layers.0.fc" },
            Definition::TensorName {
                address: 1 << 45,
                seq: 78,
                kind: TensorKind::OptimizerState,
                name: "Adam.exp_avg of fc.weight",
                shape: "float32[2, 3]",
            },
            Definition::Label { id: 5, origin: LabelOrigin::Nvtx, text: "step" },
            Definition::Cycle { address: 1 << 45, seq: 79, file: "cycle-0.html", text: "Node.parent -> Node" },
            Definition::Module { id: ModuleId(3), path: "/lib/libcudart.so.13", build_id: "00ff" },
            Definition::NativeFrame { id: FrameId(2), module: ModuleId(3), address: 1 << 40 },
            Definition::Thread { id: ThreadId(1), tid: 4242, name: "pt_autograd_0" },
            Definition::Pool { id: 1, pool: (0, 7) },
            Definition::Device { ordinal: 0, name: "H200", total: 1 << 37, used_before: 5 << 20, pci: "0000:01:00.0" },
            Definition::FrameOrigin { frame: FrameId(1), position: 2, name: "g", filename: "train.py", line: 23 },
            Definition::Rank { rank: 3, size: 8 },
            Definition::Notice { topic: "torch.tracker", text: "attached", status: NoticeStatus::Works },
            Definition::Rotation(rotation()),
            Definition::EarlierBlock(EarlierBlock {
                seq: 80,
                progress: rotation().progress,
                phase: "load",
                category: "parameter",
                rule: "name-parameter",
            }),
        ];
        let mut bytes = Vec::new();
        for d in &all {
            d.encode(&mut bytes);
        }
        let mut cursor = Cursor::new(&bytes);
        for d in &all {
            assert_eq!(Definition::decode(&mut cursor).unwrap().as_ref(), Some(d));
        }
        assert!(cursor.is_empty());
    }

    #[test]
    fn a_module_without_a_build_id_is_read() {
        let bytes = [kind::MODULE, 4, 3, 2, b'/', b'a'];
        let expected = Definition::Module { id: ModuleId(3), path: "/a", build_id: "" };
        assert_eq!(Definition::decode(&mut Cursor::new(&bytes)).unwrap(), Some(expected));
    }

    #[test]
    fn a_notice_without_a_status_is_read() {
        let bytes = [kind::NOTICE, 4, 1, b'a', 1, b'b'];
        let expected = |status| Some(Definition::Notice { topic: "a", text: "b", status });
        assert_eq!(Definition::decode(&mut Cursor::new(&bytes)).unwrap(), expected(NoticeStatus::Remark));
        let of_newer_build = [kind::NOTICE, 5, 1, b'a', 1, b'b', 9];
        assert_eq!(Definition::decode(&mut Cursor::new(&of_newer_build)).unwrap(), expected(NoticeStatus::Remark));
        let off = [kind::NOTICE, 5, 1, b'a', 1, b'b', 2];
        assert_eq!(Definition::decode(&mut Cursor::new(&off)).unwrap(), expected(NoticeStatus::Off));
    }

    #[test]
    fn an_unknown_kind_is_skipped() {
        let mut bytes = vec![200, 3, 1, 2, 3];
        Definition::Notice { topic: "a", text: "b", status: NoticeStatus::Remark }.encode(&mut bytes);
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(Definition::decode(&mut cursor).unwrap(), None);
        assert!(matches!(Definition::decode(&mut cursor).unwrap(), Some(Definition::Notice { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_decoded_or_rejected(bytes: Vec<u8>) {
            let _ = Definition::decode(&mut Cursor::new(&bytes));
        }
    }
}
