//! Reads the settings and the figures of an engine that serves models: what it decided about its own memory.
//!
//! Examples are the blocks of vLLM's KV cache, the share of the device that it may use, and what it has estimated for
//! CUDA graphs. Only the engine's own objects have them. A pending call reads them when the program is first seen in a
//! function of the table below, between two Python instructions. From then on, [`cache_use`](super::cache_use) reads
//! the counters of the cache.
//!
//! Constraints: it runs no Python code and keeps no object. It reads only attributes that objects store, and of those
//! only values of the built-in types `int`, `float`, `bool` and `str`.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memtrace_stackwalk::FrameText;
use memtrace_trace::definition::Definition;
use memtrace_trace::ids::FrameId;

use super::cache_use::{self, CacheCounters, CacheReader};
use crate::cpython::api::{self, PyObjectPtr};
use crate::cpython::gil::{GilToken, PyOwned};
use crate::recording::emit::truncate;
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::recording::watch::Cause;
use crate::torch::gc;

/// An engine, and what is read of it.
struct Engine {
    /// The beginning of the paths in the recording.
    name: &'static str,
    /// The end of the path of the file that has the functions.
    file: &'static str,
    /// The functions whose first frame requests a reading: each ends a stage after which more is known.
    functions: &'static [&'static str],
    /// The classes of the object that has all attributes: module and name. The first that is imported counts.
    classes: &'static [(&'static CStr, &'static CStr)],
    /// The paths of the attributes, from that object.
    attributes: &'static [&'static str],
    /// The counters of the cache of keys and values.
    counters: &'static CacheCounters,
}

static ENGINES: &[Engine] = &[
    Engine {
        name: "vllm",
        file: "vllm/v1/worker/gpu_worker.py",
        functions: &[
            "init_device",
            "load_model",
            "determine_available_memory",
            "initialize_from_config",
            "compile_or_warm_up_model",
            "execute_model",
            "shutdown",
        ],
        classes: &[(c"vllm.v1.worker.gpu_worker", c"Worker")],
        attributes: &[
            "requested_memory",
            "available_kv_cache_memory_bytes",
            "peak_activation_memory",
            "cudagraph_memory_estimate",
            "model_runner.model_memory_usage",
            "model_runner.kv_cache_config.num_blocks",
            "vllm_config.cache_config.block_size",
            "vllm_config.cache_config.cache_dtype",
            "vllm_config.cache_config.gpu_memory_utilization",
            "vllm_config.cache_config.kv_cache_size_tokens",
            "vllm_config.cache_config.mamba_block_size",
            "vllm_config.cache_config.num_gpu_blocks",
            "vllm_config.compilation_config.max_cudagraph_capture_size",
            "vllm_config.lora_config.max_loras",
            "vllm_config.model_config.enable_sleep_mode",
            "vllm_config.model_config.enforce_eager",
            "vllm_config.model_config.hf_text_config.attention_chunk_size",
            "vllm_config.model_config.hf_text_config.sliding_window",
            "vllm_config.model_config.max_model_len",
            "vllm_config.model_config.model_arch_config.head_size",
            "vllm_config.model_config.model_arch_config.is_deepseek_mla",
            "vllm_config.model_config.model_arch_config.total_num_hidden_layers",
            "vllm_config.model_config.model_arch_config.total_num_kv_heads",
            "vllm_config.model_config.quantization",
            "vllm_config.parallel_config.data_parallel_size",
            "vllm_config.parallel_config.pipeline_parallel_size",
            "vllm_config.parallel_config.tensor_parallel_size",
            "vllm_config.scheduler_config.max_num_batched_tokens",
            "vllm_config.scheduler_config.max_num_seqs",
        ],
        counters: &cache_use::VLLM,
    },
    Engine {
        name: "sglang",
        file: "sglang/srt/model_executor/model_runner.py",
        functions: &["load_model", "init_memory_pool", "alloc_memory_pool", "forward"],
        classes: &[(c"sglang.srt.model_executor.model_runner", c"ModelRunner")],
        attributes: &[
            "graph_mem_usage",
            "max_running_requests",
            "max_total_num_tokens",
            "mem_fraction_static",
            "page_size",
            "pp_size",
            "server_args.chunked_prefill_size",
            "server_args.context_length",
            "server_args.cuda_graph_max_bs_decode",
            "server_args.disable_cuda_graph",
            "server_args.enable_memory_saver",
            "server_args.kv_cache_dtype",
            "server_args.quantization",
            "model_config.context_len",
            "tp_size",
            "weight_load_mem_usage",
        ],
        counters: &cache_use::SGLANG,
    },
];

/// The part of engines in a recording.
pub(crate) const OBSERVER: Observer = Observer {
    start: Some(|options, _| STATE.set(EngineState { is_on: options.names, ..EngineState::default() })),
    new_frame: Some(new_frame),
    watched: Some(|watch, cause| {
        if cause == Cause::Counters && STATE.get().is_some_and(|state| state.is_on) {
            cache_use::request(watch, read_counters);
        }
    }),
    ..Observer::NONE
};

/// The state of one recording.
#[derive(Default)]
struct EngineState {
    is_on: bool,
    /// By bit: the functions of all engines that have requested a reading.
    seen: AtomicU32,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    /// The reader of the counters, once their object is found.
    reader: Mutex<Option<CacheReader>>,
}

static STATE: Slot<EngineState> = Slot::new();

/// Requests a reading at the first frame of a function in the table.
fn new_frame(_: FrameId, text: &FrameText<'_>) {
    let Some(state) = STATE.get().filter(|state| state.is_on) else { return };
    let mut functions = ENGINES.iter().flat_map(|engine| engine.functions.iter().map(move |name| (engine, name)));
    let is_function = |(engine, name): (&Engine, &&str)| *name == text.name && text.filename.ends_with(engine.file);
    let Some(at) = functions.position(is_function) else { return };
    let bit = 1 << (at % 32);
    if state.seen.load(Ordering::Relaxed) & bit != 0 || state.is_call_pending.swap(true, Ordering::AcqRel) {
        return;
    }
    let is_queued = api::find().filter(|api| api.is_running()).is_some_and(|api| api.queue_call(read));
    if is_queued {
        state.seen.fetch_or(bit, Ordering::Relaxed);
    } else {
        state.is_call_pending.store(false, Ordering::Release);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn read(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    // `None` in a forked child: the request belongs to its parent.
    let Some(state) = Process::if_started().and_then(|_| STATE.get()) else { return 0 };
    state.is_call_pending.store(false, Ordering::Release);
    // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
    let gil = api::found().filter(|api| api.has_type_slots()).and_then(|api| unsafe { GilToken::new(api) });
    let Some(gil) = gil else { return 0 };
    ENGINES.iter().for_each(|engine| _ = engine.read(gil, state));
    0
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn read_counters(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    let Some((process, state)) = Process::if_started().zip(STATE.get()) else { return 0 };
    // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
    let gil = api::found().and_then(|api| unsafe { GilToken::new(api) });
    if let Some((gil, mut reader)) = gil.zip(state.reader.try_lock().ok())
        && reader.as_mut().is_some_and(|reader| !reader.read(gil))
    {
        *reader = None;
    } else {
        cache_use::schedule(&process.watch);
    }
    0
}

impl Engine {
    /// Writes the attributes of the first object of the engine's class. `None` if there is none.
    fn read(&self, gil: GilToken<'_>, state: &EngineState) -> Option<()> {
        let class = self.classes.iter().find_map(|(module, name)| gil.class(module, name))?;
        let (module, name) = self.counters.class;
        let classes: Vec<_> = std::iter::once(class).chain(gil.class(module, name)).collect();
        let _gc_paused = gil.pause_gc()?;
        let lists = Guard::enter().and_then(|mut guard| gc::list_heads(&mut guard));
        let (mut object, mut counting) = (None, None);
        gil.instances(&classes, lists, &mut |class, found| {
            let first = if class == 0 { &mut object } else { &mut counting };
            first.get_or_insert(found);
        });
        if let Some((counting, mut reader)) = counting.zip(state.reader.try_lock().ok())
            && reader.is_none()
        {
            *reader = CacheReader::new(gil, self.counters, counting);
            Process::if_started().filter(|_| reader.is_some()).inspect(|process| cache_use::schedule(&process.watch));
        }
        let object = object?;
        let values = self.attributes.iter().filter_map(|path| Some((path, value(gil, object, path)?)));
        let values: Vec<_> = values.collect();
        let mut guard = Guard::enter()?;
        for (path, value) in values {
            let path = format!("{}.{path}", self.name);
            let value = truncate(guard.process(), &value);
            guard.define(&Definition::EngineAttribute { path: &path, value });
        }
        Some(())
    }
}

/// The value of the attribute at `path`. `None` if there is none, or for another type.
fn value(gil: GilToken<'_>, object: PyObjectPtr, path: &str) -> Option<String> {
    let mut at: Option<PyOwned<'_>> = None;
    for name in path.split('.') {
        at = gil.constant_or_stored(at.as_ref().map_or(object, |at| at.object), &gil.new_str(name)?).map(Some)?;
    }
    let value = at?.object;
    let is_plain = ["int", "float", "bool", "str"].iter().any(|class| gil.is_builtin(value, class));
    if is_plain { gil.text_of(value) } else { None }
}
