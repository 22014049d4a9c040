//! Stream capture and graphs.

use crate::state::{code, current_device, machine, now_ns};
use simcuda::error::{Error, Result};
use simcuda::out::Out;
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

const NONE: c_int = 0;
const ACTIVE: c_int = 1;

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, _mode: c_int) -> c_int {
    let m = &mut *machine();
    let current = current_device();
    let begin = |m: &mut simcuda::machine::Machine| -> Result<()> {
        if m.capture_of(stream, current)?.is_some() {
            return Err(Error::IllegalState);
        }
        let id = m.graphs.begin(stream, &mut m.handles);
        m.streams.get_mut(stream, current)?.capture = Some(id);
        Ok(())
    };
    code(begin(m))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(stream: u64, graph: Out<u64>) -> c_int {
    let m = &mut *machine();
    let ended = m.capture_of(stream, current_device()).and_then(|capture| {
        let capture = capture.ok_or(Error::IllegalState)?;
        m.graphs.end(capture.id)
    });
    code(ended.map(|handle| graph.put(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: u64, status: Out<c_int>) -> c_int {
    let live = machine().capture_of(stream, current_device());
    code(live.map(|capture| status.put(if capture.is_some() { ACTIVE } else { NONE })))
}

/// Reports the capture of a stream. The lists of dependencies are empty.
fn capture_info(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: Out<*const c_void>,
    count: Out<usize>,
) -> c_int {
    let live = machine().capture_of(stream, current_device());
    code(live.map(|capture| {
        status.put(if capture.is_some() { ACTIVE } else { NONE });
        id.put(capture.map_or(0, |c| c.id));
        graph.put(capture.map_or(0, |c| c.graph));
        dependencies.put(ptr::null());
        count.put(0);
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: Out<*const c_void>,
    count: Out<usize>,
) -> c_int {
    capture_info(stream, status, id, graph, dependencies, count)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: Out<*const c_void>,
    edges: Out<*const c_void>,
    count: Out<usize>,
) -> c_int {
    edges.put(ptr::null());
    capture_info(stream, status, id, graph, dependencies, count)
}

thread_local! {
    /// The initial mode is `CU_STREAM_CAPTURE_MODE_GLOBAL`.
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) -> c_int {
    let Some(new) = mode.get() else { return Error::InvalidValue.code() };
    mode.put(MODE.replace(new));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphCreate(graph: Out<u64>, _flags: c_uint) -> c_int {
    let m = &mut *machine();
    let handle = m.graphs.create(&mut m.handles);
    graph.put(handle);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, _flags: u64) -> c_int {
    let made = machine().instantiate_graph(graph, current_device());
    code(made.map(|handle| out.put(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(instance: u64, stream: u64) -> c_int {
    let m = &mut *machine();
    let (current, now) = (current_device(), now_ns());
    let launched = m.graphs.instance(instance).and_then(|instance| {
        for _ in 0..instance.graph.nodes {
            m.launch(stream, current, now)?;
        }
        Ok(())
    });
    code(launched)
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(_instance: u64, _stream: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: u64) -> c_int {
    code(machine().graphs.destroy(graph))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(instance: u64) -> c_int {
    code(machine().destroy_graph_instance(instance))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> c_int {
    let found = machine().graphs.graph(graph);
    code(found.map(|g| {
        if !nodes.is_null() {
            for i in 0..count.get().unwrap_or(0) {
                nodes.nth(i).put(graph + 1 + i as u64);
            }
        }
        count.put(g.nodes as usize);
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDebugDotPrint(_graph: u64, _path: *const c_void, _flags: c_uint) -> c_int {
    0
}
