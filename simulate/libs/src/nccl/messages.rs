//! Messages from one rank to another, and groups of them.

use super::communicator::Communicator;
use super::{INVALID, content, copy};
use simcuda::reduction::element_bytes;
use std::cell::RefCell;
use std::ffi::c_int;

/// A receive of a group, which waits until all sends of the group are done.
#[derive(Debug)]
struct Receive {
    to: *mut u8,
    bytes: usize,
    from_rank: u32,
    communicator: *const Communicator,
    stream: u64,
}

impl Receive {
    /// # Safety
    /// The communicator exists, and `to` is valid for writes of `bytes` bytes.
    unsafe fn run(&self) -> c_int {
        // SAFETY: the caller guarantees that the communicator exists.
        let communicator = unsafe { &*self.communicator };
        let exchange = communicator.exchange(self.bytes);
        let data =
            exchange.and_then(|exchange| exchange.receive(self.from_rank)).filter(|data| data.len() == self.bytes);
        // SAFETY: the caller guarantees that `to` is valid, and the data has as many bytes.
        unsafe { copy(data.as_ref().map_or(std::ptr::null(), |data| data.as_ptr()), self.to, self.bytes, self.stream) };
        communicator.status()
    }
}

/// The open groups of a thread.
struct Groups {
    depth: u32,
    receives: Vec<Receive>,
}

thread_local! {
    static GROUPS: RefCell<Groups> = const { RefCell::new(Groups { depth: 0, receives: Vec::new() }) };
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn ncclGroupStart() -> c_int {
    GROUPS.with_borrow_mut(|groups| groups.depth += 1);
    0
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn ncclGroupEnd() -> c_int {
    let receives = GROUPS.with_borrow_mut(|groups| {
        groups.depth = groups.depth.saturating_sub(1);
        if groups.depth == 0 { std::mem::take(&mut groups.receives) } else { Vec::new() }
    });
    // SAFETY: by NCCL's contract the communicators and buffers of a group exist until its end.
    receives.iter().fold(0, |status, receive| status.max(unsafe { receive.run() }))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ncclSend(
    from: *const u8,
    count: usize,
    kind: c_int,
    peer: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    if let Some(exchange) = communicator.and_then(|c| c.exchange(bytes)) {
        // SAFETY: by NCCL's contract `from` has `count` elements. A message that cannot be written does not come, which
        // the receiver notices.
        unsafe { exchange.send(peer as u32, &content(from, bytes)) }.ok();
    }
    // SAFETY: null pointers are allowed.
    unsafe { copy(from, std::ptr::null_mut(), bytes, stream) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ncclRecv(
    to: *mut u8,
    count: usize,
    kind: c_int,
    peer: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let Some(communicator) = communicator else { return INVALID };
    let receive = Receive { to, bytes: count * element_bytes(kind), from_rank: peer as u32, communicator, stream };
    let now = GROUPS.with_borrow_mut(|groups| {
        if groups.depth == 0 {
            return Some(receive);
        }
        groups.receives.push(receive);
        None
    });
    // SAFETY: by NCCL's contract the communicator exists, and `to` has `count` elements that the program may write.
    now.map_or(0, |receive| unsafe { receive.run() })
}
