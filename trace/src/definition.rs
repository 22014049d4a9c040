//! Definitions: the meaning of the ids in events. The ring and the trace file contain the same bytes.
//!
//! A definition may follow the first event that uses it and may occur twice. It is never revoked.

use crate::error::{Error, Result};
use crate::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use crate::named;
use crate::rotation::Rotation;
use crate::wire::{Cursor, put_str, put_varint};

/// The topic of the notice that the interpreter is a free-threaded build, whose objects memtrace does not read.
pub const FREE_THREADED_TOPIC: &str = "python.free_threaded";

/// The topic of the notice that PyTorch's functions for workspaces of cuBLAS are known, so that
/// [`Flags::CUBLAS_WORKSPACE`](crate::event::Flags::CUBLAS_WORKSPACE) is valid.
pub const WORKSPACES_TOPIC: &str = "torch.cublas_workspaces";

/// The longest encoded definition, in bytes. Longer strings are cut and counted before encoding.
pub const MAX_DEFINITION: usize = 16 * 1024;

named! {
    /// Whether the part of memtrace that a notice describes works. The names are those in `run.json` and
    /// `summary.json`.
    #[derive(Clone, Copy, PartialEq, Hash, Eq, Default, Debug)]
    pub enum NoticeStatus {
        /// Neither of the others. Notices of files before 1.1 have this value.
        #[default]
        Remark = 0 => "remark",
        /// This part works here: its assumptions were checked against an independent source.
        Works = 1 => "works",
        /// This part is switched off in this process. The text has the reason.
        Off = 2 => "off",
    }
}

named! {
    /// The role of a named tensor.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
    pub enum TensorKind {
        /// Anything else, including roles of a newer build.
        #[default]
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
}

named! {
    /// Why the program's objects were examined for what holds tensors.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
    pub enum ScanOccasion {
        /// While the program ran. Also stands for occasions of a newer build.
        #[default]
        Running = 0,
        /// After an allocation had failed.
        OutOfMemory = 1,
        /// Before the interpreter ended.
        End = 2,
    }
}

/// The topic of the notice that the program has an optimizer.
pub const TRAINING_TOPIC: &str = "torch.training";

/// The end of the path of a [`Definition::Holder`] whose memory the autograd graph of a tensor holds.
pub const GRAPH_HOLDER: &str = " (its autograd graph)";

named! {
    /// The API with which a program named a range. The names are those in reports.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
    pub enum LabelOrigin {
        /// `torch.profiler.record_function`, which PyTorch itself uses too. Also stands for APIs of a newer build.
        #[default]
        RecordFunction = 0 => "record_function",
        /// NVTX.
        Nvtx = 1 => "nvtx",
        /// `gpu_memtrace.annotate`.
        Annotation = 2 => "annotate",
    }
}

impl LabelOrigin {
    /// Whether the end of a range has its label. Otherwise the start with the same number, or the innermost one of the
    /// thread, has it.
    pub const fn end_has_label(self) -> bool {
        matches!(self, LabelOrigin::RecordFunction)
    }
}

/// A value in a definition.
trait Value<'a>: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(c: &mut Cursor<'a>) -> Result<Self>;
}

macro_rules! values {
    ($($Type:ty: |$value:ident| $number:expr, |$c:ident| $taken:expr;)*) => {
        $(impl Value<'_> for $Type {
            fn put(&self, out: &mut Vec<u8>) {
                let $value = *self;
                put_varint(out, $number);
            }

            fn take($c: &mut Cursor<'_>) -> Result<Self> {
                $taken
            }
        })*
    };
}

values! {
    u16: |v| v.into(), |c| u16::try_from(c.varint()?).map_err(|_| Error::Malformed { what: "16-bit number" });
    u32: |v| v.into(), |c| c.varint32();
    u64: |v| v, |c| c.varint();
    bool: |v| v.into(), |c| Ok(c.varint()? != 0);
    FrameId: |v| v.0.into(), |c| c.varint32().map(FrameId);
    StackId: |v| v.0.into(), |c| c.varint32().map(StackId);
    ContextId: |v| v.0.into(), |c| c.varint32().map(ContextId);
    ModuleId: |v| v.0.into(), |c| c.varint32().map(ModuleId);
    ThreadId: |v| v.0.into(), |c| c.varint32().map(ThreadId);
    NoticeStatus: |v| v as u64, |c| Ok(NoticeStatus::from_wire(c.varint()?).unwrap_or_default());
    TensorKind: |v| v as u64, |c| Ok(TensorKind::from_wire(c.varint()?).unwrap_or_default());
    ScanOccasion: |v| v as u64, |c| Ok(ScanOccasion::from_wire(c.varint()?).unwrap_or_default());
    LabelOrigin: |v| v as u64, |c| Ok(LabelOrigin::from_wire(c.varint()?).unwrap_or_default());
}

impl Value<'_> for (u64, u64) {
    fn put(&self, out: &mut Vec<u8>) {
        put_varint(out, self.0);
        put_varint(out, self.1);
    }

    fn take(c: &mut Cursor<'_>) -> Result<Self> {
        Ok((c.varint()?, c.varint()?))
    }
}

impl<'a> Value<'a> for &'a str {
    fn put(&self, out: &mut Vec<u8>) {
        put_str(out, self);
    }

    fn take(c: &mut Cursor<'a>) -> Result<Self> {
        c.str()
    }
}

impl<'a> Value<'a> for &'a [u8] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    fn take(c: &mut Cursor<'a>) -> Result<Self> {
        Ok(c.rest())
    }
}

impl Value<'_> for Rotation {
    fn put(&self, out: &mut Vec<u8>) {
        self.encode(out);
    }

    fn take(c: &mut Cursor<'_>) -> Result<Self> {
        Rotation::decode(c)
    }
}

/// Declares [`Definition`] and its encoding, and in [`owned`] the types that own their texts.
///
/// `Kind = NUMBER [ID] -> Owned { FIELDS }`: the encoding has the id and the fields in this order, the owned type has
/// the fields. `or VALUE` follows a field that definitions of earlier versions lack. `bytes` are the rest of a
/// definition.
macro_rules! definitions {
    (
        $(
            $(#[$doc:meta])*
            $Kind:ident = $number:literal $([$key:ident: $Key:tt])? $(-> $Owned:ident $(+ $Derive:ident)?)? {
                $($(#[$field_doc:meta])* $field:ident: $Type:tt $(or $default:expr)?,)*
            }
        )*
    ) => {
        /// One definition. It borrows from the bytes that it was decoded from.
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub enum Definition<'a> {
            $(
                $(#[$doc])*
                $Kind {
                    $(
                        /// The id being defined.
                        $key: $Key,
                    )?
                    $($(#[$field_doc])* $field: definitions!(@borrowed $Type),)*
                },
            )*
        }

        impl<'a> Definition<'a> {
            /// Appends the values. Returns the number of the kind.
            fn encode_body(&self, out: &mut Vec<u8>) -> u8 {
                match self {
                    $(Definition::$Kind { $($key,)? $($field),* } => {
                        $($key.put(out);)?
                        $($field.put(out);)*
                        $number
                    })*
                }
            }

            /// Decodes what [`Self::encode_body`] has appended. `None` if the kind is unknown.
            fn decode_body(kind: u8, mut c: Cursor<'a>) -> Result<Option<Definition<'a>>> {
                Ok(Some(match kind {
                    $($number => Definition::$Kind {
                        $($key: Value::take(&mut c)?,)?
                        $($field: definitions!(@take c $($default)?),)*
                    },)*
                    _ => return Ok(None),
                }))
            }
        }

        /// Definitions that own their texts, without their ids: tables contain them by id.
        pub mod owned {
            use super::*;

            $(definitions!(@owned $($Owned $($Derive)?)? [$(#[$doc])*] $($(#[$field_doc])* $field: $Type,)*);)*
        }
    };
    (@borrowed str) => { &'a str };
    (@borrowed bytes) => { &'a [u8] };
    (@borrowed $Type:tt) => { $Type };
    (@take $c:ident) => { Value::take(&mut $c)? };
    (@take $c:ident $default:expr) => { if $c.is_empty() { $default } else { Value::take(&mut $c)? } };
    (@owned [$($doc:tt)*] $($fields:tt)*) => {};
    (
        @owned $Owned:ident $($Derive:ident)? [$(#[$doc:meta])*] $($(#[$field_doc:meta])* $field:ident: $Type:tt,)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, Default, Debug $(, $Derive)?)]
        pub struct $Owned {
            $($(#[$field_doc])* pub $field: definitions!(@text $Type),)*
        }
    };
    (@text str) => { Box<str> };
    (@text $Type:tt) => { $Type };
}

definitions! {
    /// One line of one function.
    Frame = 1 {
        /// The id being defined.
        id: FrameId,
        /// The function's name, as a traceback prints it (`co_name`).
        name: str,
        /// The qualified name (`co_qualname`) if the interpreter has it, otherwise the name.
        qualname: str,
        /// The file name in the code object.
        filename: str,
        /// The line, 0 if unknown.
        line: u32,
        /// The first line of the function, 0 if unknown.
        first_line: u32,
    }

    /// A stack: `frame`, called from `parent`.
    Stack = 2 [id: StackId] -> StackNode + Copy {
        /// The caller's stack. `NONE` if `frame` is the outermost.
        parent: StackId,
        /// The innermost frame.
        frame: FrameId,
    }

    /// An autograd node that runs.
    Context = 3 [id: ContextId] -> Context {
        /// The node's C++ type without the namespaces of PyTorch, for example `ConvolutionBackward0`.
        node: str,
        /// The Python stack of the forward call that created the node. `NONE` if unknown.
        forward: StackId,
        /// The `nn.Module` whose call created the node ([`Definition::NnCall`]). `NONE` if unknown. Since 1.2.
        module: ContextId or ContextId::NONE,
    }

    /// A call of an `nn.Module`. It shares the ids of [`Definition::Context`]: events outside backward have such a
    /// context. Since 1.2.
    NnCall = 12 [id: ContextId] -> NnCall {
        /// The call that contains this one. `NONE` for an outermost call. Smaller than `id`.
        caller: ContextId,
        /// The address of the module's Python object.
        object: u64,
        /// The name of its class.
        class: str,
    }

    /// The name of an `nn.Module` in the model that contains it. Since 1.2.
    NnName = 13 -> NnName {
        /// The address of the module's Python object.
        object: u64,
        /// The number of events when the name was read. The name is valid for calls around that event.
        seq: u64,
        /// The name of its class.
        class: str,
        /// The path as in `named_modules()`, for example `layer1.0.conv1`. Empty for the model itself.
        name: str,
    }

    /// A name of a tensor's memory. Memory that several tensors share has several names. Since 1.2.
    TensorName = 14 -> TensorName {
        /// The address at which the storage begins.
        address: u64,
        /// The number of events when the name was read. It names the block that was at the address then.
        seq: u64,
        /// The tensor's role.
        kind: TensorKind,
        /// For example `layer1.0.conv1.weight`, `layer1.0.conv1.weight.grad`, `Adam.exp_avg of layer1.0.conv1.weight`.
        name: str,
        /// Data type and shape, for example `float32[64, 3, 7, 7]`. Empty if unknown.
        shape: str,
    }

    /// A name that the program gave to a range. Since 1.2.
    Label = 15 [id: u32] -> Label {
        /// The API that the program used.
        origin: LabelOrigin,
        /// The name.
        text: str,
    }

    /// A reference cycle that held a tensor's memory until the cyclic garbage collector ran (`--cycles`). There is one
    /// definition for each tensor's memory. Since 1.2.
    Cycle = 16 -> Cycle {
        /// The address at which the tensor's storage begins, 0 if unknown.
        address: u64,
        /// The number of events when the cycle was read. It held the block that was at the address then.
        seq: u64,
        /// The file in the run's folder that shows the objects. Empty if there is none.
        file: str,
        /// The cycle in one line, for example `Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor
        /// float32[1024, 1024]`.
        text: str,
    }

    /// One examination of the program's objects for what holds tensors (`--holders`). Its [`Definition::Holder`]s
    /// precede it and have the same `seq`. Since 1.2.
    HolderScan = 17 -> HolderScan + Copy {
        /// The number of events at that time.
        seq: u64,
        /// The occasion.
        occasion: ScanOccasion,
        /// How many objects were visited.
        objects: u64,
        /// Whether objects were left out because there are too many.
        is_partial: bool,
    }

    /// The Python path that holds a tensor's memory (`--holders`). It is valid from this scan on, until the block is
    /// freed or another definition for the address follows. Since 1.2.
    Holder = 18 -> Holder {
        /// The address at which the tensor's storage begins.
        address: u64,
        /// The number of events when the path was read. It held the block that was at the address then.
        seq: u64,
        /// For example `__main__.history[37]` or `frame validate: preds`. Ends with [`GRAPH_HOLDER`] if the autograd
        /// graph of the tensor at the path holds the memory. Empty if no path holds the memory any more.
        path: str,
        /// Data type and shape of the tensor at the path, for example `int64[8, 1900]`. Empty if unknown.
        shape: str or "",
    }

    /// A loaded object.
    Module = 4 [id: ModuleId] -> Module {
        /// Its path as the loader has it. For the executable, the target of `/proc/self/exe`.
        path: str,
        /// Its GNU build id in lowercase hexadecimal digits. Empty if it has none.
        build_id: str or "",
    }

    /// A thread.
    Thread = 5 [id: ThreadId] -> Thread {
        /// The kernel's thread id.
        tid: u32,
        /// The kernel's name for it (`comm`).
        name: str,
    }

    /// A private memory pool (of a CUDA graph or a `MemPool`). The id 0, the default pool, is defined if events carry
    /// their pools.
    Pool = 6 {
        /// The id used in events.
        id: u16,
        /// PyTorch's `MempoolId_t`.
        pool: (u64, u64),
    }

    /// A GPU, by the ordinal that the process uses.
    Device = 7 [ordinal: u32] -> Device {
        /// Its marketing name.
        name: str,
        /// Its total memory in bytes.
        total: u64,
        /// The bytes in use when the process first allocated on it (`cuMemGetInfo`, this process's context included).
        used_before: u64,
        /// The PCI bus id, for example `0000:17:00.0`.
        pci: str,
    }

    /// A frame of native code. It shares the ids of [`Definition::Frame`] and occurs in stacks in the same way.
    NativeFrame = 9 [id: FrameId] -> NativeFrame + Copy {
        /// The object that contains the code. `NONE` for code in no loaded object (generated at run time).
        module: ModuleId,
        /// The return address as an ELF virtual address of the object's file, which is the run-time address minus the
        /// load bias. Without a module it is the run-time address. The call is the instruction before it.
        address: u64,
    }

    /// A line of the program from which `torch.compile` generated a frame's line. PyTorch lists it as the frame's
    /// caller, and so does memtrace.
    FrameOrigin = 11 {
        /// The frame in the generated file.
        frame: FrameId,
        /// The position among the frame's origins. 0 is next to the frame, 1 follows 0, and so on.
        position: u32,
        /// The function's name.
        name: str,
        /// The file's name.
        filename: str,
        /// The line.
        line: u32,
    }

    /// The process's rank in a distributed job, as the program gave it to PyTorch
    /// (`torch.distributed.init_process_group`).
    Rank = 10 {
        /// Its rank.
        rank: u32,
        /// The number of ranks.
        size: u32,
    }

    /// A note about an action or a failure of a part of memtrace.
    Notice = 8 -> Notice {
        /// The part, for example `torch.tracker`.
        topic: str,
        /// A sentence about it.
        text: str,
        /// Whether the part works.
        status: NoticeStatus or NoticeStatus::Remark,
    }

    /// An attribute of an object of an engine that serves models, such as the number of blocks of its KV cache. Since
    /// 1.7.
    EngineAttribute = 30 -> EngineAttribute {
        /// The engine and the path of the attribute, such as `vllm.vllm_config.cache_config.num_gpu_blocks`.
        path: str,
        /// The value as Python prints it.
        value: str,
    }

    /// Successive readings of how much of its KV cache an engine that serves models uses, by its own counters. Each
    /// reading is in one definition. Since 1.7.
    CacheUse = 31 -> CacheUse + Copy {
        /// The time of the highest use, in clock ticks.
        ticks: u64,
        /// The highest use, in the engine's units (blocks or tokens). Blocks that are only kept for requests with the
        /// same prefix are not in use.
        used: u64,
        /// The number of units of the cache.
        size: u64,
        /// The requests that had units at that time.
        requests: u64,
        /// The number of readings while requests had units.
        readings: u64,
        /// The sum of the use over these readings.
        sum: u64,
        /// The number of readings at which no unit was free.
        full: u64,
        /// The requests that were seen to lose their units to others, since the last such definition.
        preempted: u64,
        /// The requests that were seen to end, since the last such definition.
        ended: u64,
    }

    /// The trace was rotated (`--keep`): where its kept events begin. Since 1.6.
    Rotation = 29 {
        /// The rotation.
        rotation: Rotation,
    }

    /// The same in a trace of version 1.5, with what the analysis remembers of the dropped events.
    PackedRotation = 27 {
        /// The rotation.
        rotation: Rotation,
        /// The position in the program, in the analysis's encoding.
        progress: bytes,
    }

    /// In a trace of version 1.5: what the analysis remembers of a block that is older than the kept events.
    PackedBlock = 28 {
        /// The block, in the analysis's encoding.
        block: bytes,
    }
}

impl<'a> Definition<'a> {
    /// Appends the encoding: kind (1 byte), length of the rest (varint), then the values in order of declaration.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut body = Vec::with_capacity(64);
        let kind = self.encode_body(&mut body);
        out.push(kind);
        put_varint(out, body.len() as u64);
        out.extend_from_slice(&body);
    }

    /// Decodes one definition. `Ok(None)` is an unknown kind, which is skipped. The error is [`Error::Malformed`].
    ///
    /// Bytes after the known fields of a kind belong to a newer minor version and are ignored.
    pub fn decode(cursor: &mut Cursor<'a>) -> Result<Option<Definition<'a>>> {
        let kind = cursor.byte()?;
        let len = usize::try_from(cursor.varint()?).map_err(|_| Error::Malformed { what: "definition length" })?;
        Definition::decode_body(kind, Cursor::new(cursor.bytes(len)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_round_trips() {
        let rotation =
            Rotation { first_seq: 1 << 40, dropped: 1 << 39, recreating: 300, dropped_ticks: (1 << 50, 1 << 51) };
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
            Definition::EngineAttribute { path: "vllm.requested_memory", value: "38963404800" },
            Definition::CacheUse {
                ticks: 1 << 50,
                used: 300,
                size: 8_000,
                requests: 7,
                readings: 9,
                sum: 2_000,
                full: 0,
                preempted: 1,
                ended: 2,
            },
            Definition::Rotation { rotation },
            Definition::PackedRotation { rotation, progress: &[7, 0, 1] },
            Definition::PackedBlock { block: &[80] },
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
        let bytes = [4, 4, 3, 2, b'/', b'a'];
        let expected = Definition::Module { id: ModuleId(3), path: "/a", build_id: "" };
        assert_eq!(Definition::decode(&mut Cursor::new(&bytes)).unwrap(), Some(expected));
    }

    #[test]
    fn a_notice_without_a_status_is_read() {
        let bytes = [8, 4, 1, b'a', 1, b'b'];
        let expected = |status| Some(Definition::Notice { topic: "a", text: "b", status });
        assert_eq!(Definition::decode(&mut Cursor::new(&bytes)).unwrap(), expected(NoticeStatus::Remark));
        let of_newer_build = [8, 5, 1, b'a', 1, b'b', 9];
        assert_eq!(Definition::decode(&mut Cursor::new(&of_newer_build)).unwrap(), expected(NoticeStatus::Remark));
        let off = [8, 5, 1, b'a', 1, b'b', 2];
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
