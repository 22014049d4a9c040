//! NVTX ranges: those of `torch.cuda.nvtx`, of the `nvtx` package and of any other program.
//!
//! NVTX loads the library that `NVTX_INJECTION64_PATH` names and calls its `InitializeInjectionNvtx2`. The launcher
//! sets that variable to this library, unless it is set already. Each object that contains NVTX does this at its first
//! call: NVTX 3 is header-only, and earlier versions are the library libnvToolsExt. It passes its function tables
//! (nvtxDetail/nvtxTypes.h, whose numbers are fixed). We replace the entries for ranges, marks, domains and strings.
//!
//! CUDA's own libraries mark every call and are refused: no user wrote those ranges, and recording them would be slow.
//!
//! The program sees the same results as without a tool: a push or pop returns `NVTX_NO_PUSH_POP_TRACKING`. Only
//! handles, whose values mean nothing to the program, are not null.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{LabelOrigin, NoticeStatus};
use memtrace_trace::event::Action;

use crate::linker::mapped_object::{MappedObject, containing};
use crate::recording::guard::Guard;
use crate::recording::labels::{self, MAX_NAME_BYTES, RangeDetails, RangeKey};
use crate::recording::process::{Process, session_options};

/// `NVTX_ETID_CALLBACKS`, `NVTX_CB_MODULE_CORE`, `NVTX_CB_MODULE_CORE2` of nvtxTypes.h.
const CALLBACKS: u32 = 1;
const CORE: c_int = 1;
const CORE2: c_int = 5;
/// `NVTX_NO_PUSH_POP_TRACKING`.
const NO_TRACKING: c_int = -2;
/// `NVTX_MESSAGE_TYPE_ASCII`, `_UNICODE`, `_REGISTERED`.
const ASCII: i32 = 1;
const UNICODE: i32 = 2;
const REGISTERED: i32 = 3;

type Function = *mut c_void;
type GetExportTable = unsafe extern "C" fn(u32) -> *const ExportTable;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct ExportTable {
    struct_size: usize,
    module_table: Option<unsafe extern "C" fn(c_int, *mut *const *mut Function, *mut u32) -> c_int>,
}

/// `nvtxEventAttributes_t`, the same in versions 2 and 3.
#[repr(C)]
pub(crate) struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

/// Names of domains or registered strings. They are never freed. A handle is the address of a slot here.
struct NameTable<const N: usize> {
    names: [AtomicPtr<String>; N],
    used: AtomicU32,
}

static DOMAINS: NameTable<256> = NameTable::new();
static STRINGS: NameTable<{ 1 << 14 }> = NameTable::new();

impl<const N: usize> NameTable<N> {
    const fn new() -> NameTable<N> {
        NameTable { names: [const { AtomicPtr::new(std::ptr::null_mut()) }; N], used: AtomicU32::new(0) }
    }

    /// The handle of a name. Null if there is no free slot.
    fn add(&self, name: String) -> *const c_void {
        let known = self.names.iter().take(self.used.load(Ordering::Acquire) as usize).find(|slot| {
            // SAFETY: the pointer is null or comes from a box that `add` has leaked.
            unsafe { slot.load(Ordering::Acquire).as_ref() }.is_some_and(|known| *known == name)
        });
        let slot = known.or_else(|| {
            let slot = self.names.get(self.used.fetch_add(1, Ordering::AcqRel) as usize)?;
            slot.store(Box::into_raw(Box::new(name)), Ordering::Release);
            Some(slot)
        });
        if slot.is_none() {
            self.used.store(N as u32, Ordering::Release);
        }
        slot.map_or(std::ptr::null(), |slot| std::ptr::from_ref(slot).cast())
    }

    /// The index of a handle, counted from 1, and its name. `None` for handles that are not ours.
    fn get(&self, handle: *const c_void) -> Option<(u32, &str)> {
        let offset = handle.addr().checked_sub(self.names.as_ptr().addr())?;
        let index = offset / size_of::<AtomicPtr<String>>();
        // SAFETY: the pointer is null or comes from a box that `add` has leaked.
        let name = unsafe { self.names.get(index)?.load(Ordering::Acquire).as_ref() }?;
        offset.is_multiple_of(size_of::<AtomicPtr<String>>()).then_some((index as u32 + 1, name.as_str()))
    }
}

/// A name under construction, on the stack. `is_truncated` says that it did not fit.
struct NameBuffer {
    bytes: [u8; MAX_NAME_BYTES],
    length: usize,
    is_truncated: bool,
}

impl NameBuffer {
    fn new() -> NameBuffer {
        NameBuffer { bytes: [0; MAX_NAME_BYTES], length: 0, is_truncated: false }
    }

    fn push(&mut self, part: &[u8]) {
        let room = self.bytes.get_mut(self.length..).unwrap_or_default();
        let copied = part.len().min(room.len());
        self.is_truncated |= copied < part.len();
        for (to, from) in room.iter_mut().zip(part) {
            *to = *from;
        }
        self.length += copied;
    }

    /// # Safety
    ///
    /// `text` is null or a C string.
    unsafe fn push_ascii(&mut self, text: *const c_char) {
        if !text.is_null() {
            // SAFETY: the caller guarantees a C string. `strnlen` reads at most `MAX_NAME_BYTES + 1` bytes and not
            // beyond its end.
            let bytes =
                unsafe { std::slice::from_raw_parts(text.cast::<u8>(), libc::strnlen(text, MAX_NAME_BYTES + 1)) };
            self.push(bytes);
        }
    }

    /// # Safety
    ///
    /// `text` is null or a string of `wchar_t` that ends with 0.
    unsafe fn push_wide(&mut self, text: *const u32) {
        let mut at = text;
        while !at.is_null() && !self.is_truncated {
            // SAFETY: the caller guarantees a terminating 0, and the loop has not passed it.
            let unit = unsafe { at.read_unaligned() };
            if unit == 0 {
                break;
            }
            let mut encoded = [0; 4];
            let character = char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER);
            self.push(character.encode_utf8(&mut encoded).as_bytes());
            // SAFETY: the unit just read is not the terminating 0, so another one follows.
            at = unsafe { at.add(1) };
        }
    }

    /// # Safety
    ///
    /// `attributes` is null or points to attributes as NVTX's header defines them.
    unsafe fn push_message(&mut self, attributes: *const EventAttributes) {
        // SAFETY: the caller guarantees valid attributes. A structure smaller than ours has no message and is not read
        // further.
        unsafe {
            if attributes.is_null() || usize::from((*attributes).size) < size_of::<EventAttributes>() {
                return;
            }
            let message = (*attributes).message;
            match (*attributes).message_type {
                ASCII => self.push_ascii(message.cast()),
                UNICODE => self.push_wide(message.cast()),
                REGISTERED => self.push(STRINGS.get(message).map_or(&b""[..], |(_, text)| text.as_bytes())),
                _ => {}
            }
        }
    }

    /// Starts a name with its domain's name and a colon. Also returns the domain's index, 0 for the default domain.
    fn in_domain(domain: *const c_void) -> (NameBuffer, u32) {
        let mut text = NameBuffer::new();
        let Some((number, name)) = DOMAINS.get(domain) else { return (text, 0) };
        text.push(name.as_bytes());
        text.push(b":");
        (text, number)
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn to_name(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    /// Records range events with this name, one for each action.
    fn record(&self, actions: &[Action], key: RangeKey) {
        if Process::if_started().is_none() {
            return;
        }
        let Some(mut guard) = Guard::enter() else { return };
        if self.is_truncated {
            guard.process().count(Counter::StringsTruncated, 1);
        }
        for action in actions {
            labels::record_range(&mut guard, *action, LabelOrigin::Nvtx, self.bytes(), key, RangeDetails::default());
        }
    }
}

const START: &[Action] = &[Action::RangeStart];
/// A mark is recorded as a range of zero length.
const MARK: &[Action] = &[Action::RangeStart, Action::RangeEnd];

fn record_end(key: RangeKey) {
    if Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
    {
        labels::record_end(&mut guard, key, RangeDetails::default());
    }
}

/// The three forms in which a message arrives. `$push` appends the message to `text`.
macro_rules! messages {
    ($($encoding:ident $argument:ty, $push:ident;)*) => { $(
        mod $encoding {
            use super::*;

            /// Implements `nvtxMark*`.
            pub(super) unsafe extern "C" fn mark(message: *const $argument) {
                let mut text = NameBuffer::new();
                // SAFETY: NVTX's caller guarantees a valid message of this form.
                unsafe { text.$push(message) };
                text.record(MARK, RangeKey::default());
            }

            /// Implements `nvtxRangeStart*`. Returns the range's number.
            pub(super) unsafe extern "C" fn start(message: *const $argument) -> u64 {
                let key = RangeKey { number: labels::next_range_number(), ..RangeKey::default() };
                let mut text = NameBuffer::new();
                // SAFETY: NVTX's caller guarantees a valid message of this form.
                unsafe { text.$push(message) };
                text.record(START, key);
                key.number
            }

            /// Implements `nvtxRangePush*`.
            pub(super) unsafe extern "C" fn push(message: *const $argument) -> c_int {
                let mut text = NameBuffer::new();
                // SAFETY: NVTX's caller guarantees a valid message of this form.
                unsafe { text.$push(message) };
                text.record(START, RangeKey::default());
                NO_TRACKING
            }
        }
    )* };
}

messages! {
    ascii c_char, push_ascii;
    wide u32, push_wide;
    ex EventAttributes, push_message;
}

unsafe extern "C" fn range_end(number: u64) {
    record_end(RangeKey { number, ..RangeKey::default() });
}

unsafe extern "C" fn range_pop() -> c_int {
    record_end(RangeKey::default());
    NO_TRACKING
}

unsafe extern "C" fn domain_mark(domain: *const c_void, attributes: *const EventAttributes) {
    let (mut text, domain) = NameBuffer::in_domain(domain);
    // SAFETY: NVTX's caller guarantees valid attributes.
    unsafe { text.push_message(attributes) };
    text.record(MARK, RangeKey { domain, number: 0 });
}

unsafe extern "C" fn domain_start(domain: *const c_void, attributes: *const EventAttributes) -> u64 {
    let (mut text, domain) = NameBuffer::in_domain(domain);
    let key = RangeKey { domain, number: labels::next_range_number() };
    // SAFETY: NVTX's caller guarantees valid attributes.
    unsafe { text.push_message(attributes) };
    text.record(START, key);
    key.number
}

unsafe extern "C" fn domain_end(domain: *const c_void, number: u64) {
    record_end(RangeKey { domain: DOMAINS.get(domain).map_or(0, |(number, _)| number), number });
}

unsafe extern "C" fn domain_push(domain: *const c_void, attributes: *const EventAttributes) -> c_int {
    let (mut text, domain) = NameBuffer::in_domain(domain);
    // SAFETY: NVTX's caller guarantees valid attributes.
    unsafe { text.push_message(attributes) };
    text.record(START, RangeKey { domain, number: 0 });
    NO_TRACKING
}

unsafe extern "C" fn domain_pop(domain: *const c_void) -> c_int {
    record_end(RangeKey { domain: DOMAINS.get(domain).map_or(0, |(number, _)| number), number: 0 });
    NO_TRACKING
}

unsafe extern "C" fn register_ascii(_domain: *const c_void, message: *const c_char) -> *const c_void {
    let mut text = NameBuffer::new();
    // SAFETY: NVTX's caller guarantees a C string.
    unsafe { text.push_ascii(message) };
    STRINGS.add(text.to_name())
}

unsafe extern "C" fn register_wide(_domain: *const c_void, message: *const u32) -> *const c_void {
    let mut text = NameBuffer::new();
    // SAFETY: NVTX's caller guarantees a string of `wchar_t` that ends with 0.
    unsafe { text.push_wide(message) };
    STRINGS.add(text.to_name())
}

unsafe extern "C" fn create_ascii(name: *const c_char) -> *const c_void {
    let mut text = NameBuffer::new();
    // SAFETY: NVTX's caller guarantees a C string.
    unsafe { text.push_ascii(name) };
    DOMAINS.add(text.to_name())
}

unsafe extern "C" fn create_wide(name: *const u32) -> *const c_void {
    let mut text = NameBuffer::new();
    // SAFETY: NVTX's caller guarantees a string of `wchar_t` that ends with 0.
    unsafe { text.push_wide(name) };
    DOMAINS.add(text.to_name())
}

/// CUDA's own libraries, whose ranges no user wrote.
const IGNORED_LIBRARIES: &[&[u8]] = &[b"libcu", b"libnccl", b"libnv", b"libnpp", b"libcudnn"];
/// Through libnvToolsExt, users' programs call NVTX.
const NVTX_LIBRARY: &[u8] = b"libnvToolsExt";

/// `int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t)`. Returns 1 if we record the object's ranges. Each object
/// that contains NVTX calls it once.
#[cfg_attr(not(test), unsafe(export_name = "InitializeInjectionNvtx2"))]
unsafe extern "C" fn initialize(get: Option<GetExportTable>) -> c_int {
    let Some(get) = get.filter(|_| session_options().is_some()) else { return 0 };
    let object = containing(get as usize);
    let name = object.as_ref().map(MappedObject::file_name).unwrap_or_default();
    if IGNORED_LIBRARIES.iter().any(|ignored| name.starts_with(ignored)) && !name.starts_with(NVTX_LIBRARY) {
        return 0;
    }
    // SAFETY: `get` is NVTX's own function and returns null or a table that lives as long as the object.
    let table = unsafe { get(CALLBACKS).as_ref() };
    let is_subscribed = table.is_some_and(|table| {
        table.struct_size >= size_of::<ExportTable>()
            // SAFETY: `struct_size` says that the table contains this function, and NVTX is initializing the object
            // now.
            && table.module_table.is_some_and(|tables| unsafe { subscribe(tables) })
    });
    if Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
    {
        let name = String::from_utf8_lossy(name).into_owned();
        let (status, text) = if is_subscribed {
            (NoticeStatus::Works, format!("ranges of {name} are recorded"))
        } else {
            (
                NoticeStatus::Off,
                format!("the function tables of {name} are not as expected: its ranges are not recorded"),
            )
        };
        guard.notice("nvtx", status, &text);
    }
    c_int::from(is_subscribed)
}

/// Puts our functions into an object's tables: all of them or none. Returns whether it did.
///
/// # Safety
///
/// `tables` is NVTX's `GetModuleFunctionTable`, and NVTX is initializing its object.
unsafe fn subscribe(tables: unsafe extern "C" fn(c_int, *mut *const *mut Function, *mut u32) -> c_int) -> bool {
    let core: &[(usize, *const ())] = &[
        (1, ex::mark as *const ()),
        (2, ascii::mark as *const ()),
        (3, wide::mark as *const ()),
        (4, ex::start as *const ()),
        (5, ascii::start as *const ()),
        (6, wide::start as *const ()),
        (7, range_end as *const ()),
        (8, ex::push as *const ()),
        (9, ascii::push as *const ()),
        (10, wide::push as *const ()),
        (11, range_pop as *const ()),
    ];
    let core2: &[(usize, *const ())] = &[
        (1, domain_mark as *const ()),
        (2, domain_start as *const ()),
        (3, domain_end as *const ()),
        (4, domain_push as *const ()),
        (5, domain_pop as *const ()),
        (10, register_ascii as *const ()),
        (11, register_wide as *const ()),
        (12, create_ascii as *const ()),
        (13, create_wide as *const ()),
    ];
    let slots = |module: c_int, functions: &[(usize, *const ())]| {
        let (mut table, mut size) = (std::ptr::null(), 0);
        // SAFETY: `table` and `size` are writable, and the caller guarantees the function.
        let known = unsafe { tables(module, &mut table, &mut size) } != 0 && !table.is_null();
        let slot = |(index, function): &(usize, *const ())| {
            if !known || *index >= size as usize {
                return None;
            }
            // SAFETY: the index is below the table's size. Each element points to a slot for a function or is null.
            let slot = unsafe { *table.add(*index) };
            (!slot.is_null()).then_some((slot, *function))
        };
        functions.iter().map(slot).collect::<Option<Vec<_>>>()
    };
    let Some(mut all) = slots(CORE, core) else { return false };
    // NVTX before version 2 has no domains.
    all.extend(slots(CORE2, core2).unwrap_or_default());
    for (slot, function) in all {
        // SAFETY: the number identifies a slot for a pointer to a function of this type (nvtxTypes.h).
        unsafe { slot.write(function.cast_mut().cast()) };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_handle_and_other_handles_are_rejected() {
        static TABLE: NameTable<3> = NameTable::new();
        let (a, b) = (TABLE.add("a".into()), TABLE.add("b".into()));
        assert_ne!(a, b);
        assert_eq!(TABLE.add("a".into()), a);
        assert_eq!((TABLE.get(a), TABLE.get(b)), (Some((1, "a")), Some((2, "b"))));
        assert_eq!(TABLE.get(std::ptr::null()), None);
        assert_eq!(TABLE.get(a.wrapping_byte_add(1)), None);
        assert_eq!(TABLE.get(a.wrapping_byte_add(16)), None, "a free entry");
        assert!(!TABLE.add("c".into()).is_null());
        assert!(TABLE.add("d".into()).is_null() && TABLE.add("e".into()).is_null());
        assert_eq!(TABLE.add("c".into()), a.wrapping_byte_add(16));
    }

    #[test]
    fn names_are_joined_and_truncated() {
        let mut text = NameBuffer::new();
        text.push(b"domain:");
        // SAFETY: each argument is null or a string that ends with 0.
        unsafe {
            text.push_wide([0xe4, 0x1f600, u32::MAX, 0].as_ptr());
            text.push_ascii(c"!".as_ptr());
            text.push_ascii(std::ptr::null());
            text.push_wide(std::ptr::null());
        }
        assert_eq!(text.to_name(), "domain:\u{e4}\u{1f600}\u{fffd}!");
        assert!(!text.is_truncated);
        text.push(&[b'x'; MAX_NAME_BYTES]);
        assert!(text.is_truncated && text.bytes().len() == MAX_NAME_BYTES);
    }

    #[test]
    fn attributes_have_the_layout_of_the_header() {
        assert_eq!(std::mem::offset_of!(EventAttributes, message_type), 32);
        assert_eq!((std::mem::offset_of!(EventAttributes, message), size_of::<EventAttributes>()), (40, 48));
    }
}
