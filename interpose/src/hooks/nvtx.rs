//! NVTX: ranges of `torch.cuda.nvtx`, of the `nvtx` package and of any program that marks its work so.
//!
//! NVTX asks the library that `NVTX_INJECTION64_PATH` names for `InitializeInjectionNvtx2`; the launcher names us there, unless
//! somebody else is named already. Each object with NVTX in it (version 3 is headers only; before that it was libnvToolsExt) does so at
//! its first call, and gives us its tables of functions (nvtxDetail/nvtxTypes.h, whose numbers are fixed): those about ranges, marks,
//! domains and strings are ours from then on. CUDA's own libraries, which mark every call, are refused: nobody wrote those ranges, and they
//! would cost.
//!
//! What the program sees is what it sees without a tool: a push or pop returns `NVTX_NO_PUSH_POP_TRACKING`. Only handles, which mean
//! nothing to it, are not null.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{LabelOrigin, Verdict};
use memtrace_trace::event::Action;

use crate::guard::Guard;
use crate::labels::{self, LONGEST, Mark, Moment};
use crate::objects;
use crate::process::{Process, session_options};

/// `NVTX_ETID_CALLBACKS`, `NVTX_CB_MODULE_CORE`, `NVTX_CB_MODULE_CORE2`.
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
pub(crate) struct Attributes {
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

/// Names of domains, and registered strings, for good: a handle is the address of a place here.
struct Names<const N: usize> {
    names: [AtomicPtr<String>; N],
    used: AtomicU32,
}

static DOMAINS: Names<256> = Names::new();
static STRINGS: Names<{ 1 << 14 }> = Names::new();
/// Numbers of ranges that do not nest.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl<const N: usize> Names<N> {
    const fn new() -> Names<N> {
        Names { names: [const { AtomicPtr::new(std::ptr::null_mut()) }; N], used: AtomicU32::new(0) }
    }

    /// A handle for a name; null when there are too many.
    fn add(&self, name: String) -> *const c_void {
        let known = self.names.iter().take(self.used.load(Ordering::Acquire) as usize).find(|place| {
            // SAFETY: null, or leaked below.
            unsafe { place.load(Ordering::Acquire).as_ref() }.is_some_and(|known| *known == name)
        });
        let place = known.or_else(|| {
            let place = self.names.get(self.used.fetch_add(1, Ordering::AcqRel) as usize)?;
            place.store(Box::into_raw(Box::new(name)), Ordering::Release);
            Some(place)
        });
        if place.is_none() {
            self.used.store(N as u32, Ordering::Release);
        }
        place.map_or(std::ptr::null(), |place| std::ptr::from_ref(place).cast())
    }

    /// The place of a handle, from 1 on, and its name; nothing for handles that are not ours.
    fn get(&self, handle: *const c_void) -> Option<(u32, &str)> {
        let offset = handle.addr().checked_sub(self.names.as_ptr().addr())?;
        let index = offset / size_of::<AtomicPtr<String>>();
        // SAFETY: null, or leaked by `add`.
        let name = unsafe { self.names.get(index)?.load(Ordering::Acquire).as_ref() }?;
        offset.is_multiple_of(size_of::<AtomicPtr<String>>()).then_some((index as u32 + 1, name.as_str()))
    }
}

/// A name in the making, without memory of its own beyond the stack.
struct Text {
    bytes: [u8; LONGEST],
    length: usize,
    cut: bool,
}

impl Text {
    fn new() -> Text {
        Text { bytes: [0; LONGEST], length: 0, cut: false }
    }

    fn push(&mut self, part: &[u8]) {
        let room = self.bytes.get_mut(self.length..).unwrap_or_default();
        let taken = part.len().min(room.len());
        self.cut |= taken < part.len();
        for (to, from) in room.iter_mut().zip(part) {
            *to = *from;
        }
        self.length += taken;
    }

    /// # Safety
    /// Null or a C string.
    unsafe fn push_ascii(&mut self, text: *const c_char) {
        if !text.is_null() {
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), libc::strnlen(text, LONGEST + 1)) };
            self.push(bytes);
        }
    }

    /// # Safety
    /// Null or a string of `wchar_t`, which ends with 0.
    unsafe fn push_wide(&mut self, text: *const u32) {
        let mut at = text;
        while !at.is_null() && !self.cut {
            // SAFETY: not beyond the end.
            let unit = unsafe { at.read_unaligned() };
            if unit == 0 {
                break;
            }
            let mut encoded = [0; 4];
            let character = char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER);
            self.push(character.encode_utf8(&mut encoded).as_bytes());
            // SAFETY: as above.
            at = unsafe { at.add(1) };
        }
    }

    /// # Safety
    /// Null or attributes as NVTX's header describes them.
    unsafe fn push_message(&mut self, attributes: *const Attributes) {
        // SAFETY: the caller's promise; a smaller structure than ours has no message.
        unsafe {
            if attributes.is_null() || usize::from((*attributes).size) < size_of::<Attributes>() {
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

    /// The name of a domain goes before what happens in it.
    fn in_domain(domain: *const c_void) -> (Text, u32) {
        let mut text = Text::new();
        let Some((number, name)) = DOMAINS.get(domain) else { return (text, 0) };
        text.push(name.as_bytes());
        text.push(b":");
        (text, number)
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn to_text(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    /// Sends the ends of ranges of this name.
    fn tell(&self, actions: &[Action], mark: Mark) {
        if Process::if_started().is_none() {
            return;
        }
        let Some(mut guard) = Guard::enter() else { return };
        if self.cut {
            guard.process().count(Counter::StringsCut, 1);
        }
        for action in actions {
            labels::range(&mut guard, *action, LabelOrigin::Nvtx, self.bytes(), mark, Moment::default());
        }
    }
}

const START: &[Action] = &[Action::RangeStart];
/// A mark is a range without length.
const MARK: &[Action] = &[Action::RangeStart, Action::RangeEnd];

fn ended(mark: Mark) {
    if Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
    {
        labels::end(&mut guard, mark, Moment::default());
    }
}

fn next_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) + 1
}

/// The three ways in which a message comes; `$push` puts it behind what is in `text`.
macro_rules! messages {
    ($($way:ident $argument:ty, $push:ident;)*) => { $(
        mod $way {
            use super::*;

            pub(super) unsafe extern "C" fn mark(message: *const $argument) {
                let mut text = Text::new();
                // SAFETY: what NVTX's caller promises.
                unsafe { text.$push(message) };
                text.tell(MARK, Mark::default());
            }

            pub(super) unsafe extern "C" fn start(message: *const $argument) -> u64 {
                let mark = Mark { number: next_number(), ..Mark::default() };
                let mut text = Text::new();
                // SAFETY: what NVTX's caller promises.
                unsafe { text.$push(message) };
                text.tell(START, mark);
                mark.number
            }

            pub(super) unsafe extern "C" fn push(message: *const $argument) -> c_int {
                let mut text = Text::new();
                // SAFETY: what NVTX's caller promises.
                unsafe { text.$push(message) };
                text.tell(START, Mark::default());
                NO_TRACKING
            }
        }
    )* };
}

messages! {
    ascii c_char, push_ascii;
    wide u32, push_wide;
    ex Attributes, push_message;
}

unsafe extern "C" fn range_end(number: u64) {
    ended(Mark { number, ..Mark::default() });
}

unsafe extern "C" fn range_pop() -> c_int {
    ended(Mark::default());
    NO_TRACKING
}

unsafe extern "C" fn domain_mark(domain: *const c_void, attributes: *const Attributes) {
    let (mut text, domain) = Text::in_domain(domain);
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_message(attributes) };
    text.tell(MARK, Mark { domain, number: 0 });
}

unsafe extern "C" fn domain_start(domain: *const c_void, attributes: *const Attributes) -> u64 {
    let (mut text, domain) = Text::in_domain(domain);
    let mark = Mark { domain, number: next_number() };
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_message(attributes) };
    text.tell(START, mark);
    mark.number
}

unsafe extern "C" fn domain_end(domain: *const c_void, number: u64) {
    ended(Mark { domain: DOMAINS.get(domain).map_or(0, |(number, _)| number), number });
}

unsafe extern "C" fn domain_push(domain: *const c_void, attributes: *const Attributes) -> c_int {
    let (mut text, domain) = Text::in_domain(domain);
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_message(attributes) };
    text.tell(START, Mark { domain, number: 0 });
    NO_TRACKING
}

unsafe extern "C" fn domain_pop(domain: *const c_void) -> c_int {
    ended(Mark { domain: DOMAINS.get(domain).map_or(0, |(number, _)| number), number: 0 });
    NO_TRACKING
}

unsafe extern "C" fn register_ascii(_domain: *const c_void, message: *const c_char) -> *const c_void {
    let mut text = Text::new();
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_ascii(message) };
    STRINGS.add(text.to_text())
}

unsafe extern "C" fn register_wide(_domain: *const c_void, message: *const u32) -> *const c_void {
    let mut text = Text::new();
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_wide(message) };
    STRINGS.add(text.to_text())
}

unsafe extern "C" fn create_ascii(name: *const c_char) -> *const c_void {
    let mut text = Text::new();
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_ascii(name) };
    DOMAINS.add(text.to_text())
}

unsafe extern "C" fn create_wide(name: *const u32) -> *const c_void {
    let mut text = Text::new();
    // SAFETY: what NVTX's caller promises.
    unsafe { text.push_wide(name) };
    DOMAINS.add(text.to_text())
}

/// Objects whose ranges nobody wrote: CUDA's own.
const REFUSED: &[&[u8]] = &[b"libcu", b"libnccl", b"libnv", b"libnpp", b"libcudnn"];
/// libnvToolsExt is how others call NVTX.
const NOT_REFUSED: &[u8] = b"libnvToolsExt";

/// `int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t)`: 1 when we listen. Called once by each object with NVTX in it.
#[cfg_attr(not(test), unsafe(export_name = "InitializeInjectionNvtx2"))]
unsafe extern "C" fn initialize(get: Option<GetExportTable>) -> c_int {
    let Some(get) = get.filter(|_| session_options().is_some()) else { return 0 };
    let object = objects::containing(get as usize);
    let name = object.as_ref().map(objects::Caller::file_name).unwrap_or_default();
    if REFUSED.iter().any(|refused| name.starts_with(refused)) && !name.starts_with(NOT_REFUSED) {
        return 0;
    }
    // SAFETY: NVTX's own function.
    let table = unsafe { get(CALLBACKS).as_ref() };
    let listening = table.is_some_and(|table| {
        table.struct_size >= size_of::<ExportTable>()
            // SAFETY: the table says that it holds the function, and NVTX is being initialised.
            && table.module_table.is_some_and(|tables| unsafe { subscribe(tables) })
    });
    if Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
    {
        let name = String::from_utf8_lossy(name).into_owned();
        let (verdict, text) = if listening {
            (Verdict::Works, format!("ranges of {name} are recorded"))
        } else {
            (Verdict::Off, format!("the tables of {name} are not as expected: its ranges are not recorded"))
        };
        guard.notice("nvtx", verdict, &text);
    }
    c_int::from(listening)
}

/// Puts our functions into an object's tables: all of them, or none.
///
/// # Safety
/// `tables` is NVTX's `GetModuleFunctionTable`, and its object is being initialised.
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
    let places = |module: c_int, wanted: &[(usize, *const ())]| {
        let (mut table, mut size) = (std::ptr::null(), 0);
        // SAFETY: places for the answers.
        let known = unsafe { tables(module, &mut table, &mut size) } != 0 && !table.is_null();
        let place = |(index, function): &(usize, *const ())| {
            if !known || *index >= size as usize {
                return None;
            }
            // SAFETY: below the table's size, where the table has a place for a function, or null.
            let place = unsafe { *table.add(*index) };
            (!place.is_null()).then_some((place, *function))
        };
        wanted.iter().map(place).collect::<Option<Vec<_>>>()
    };
    let Some(mut all) = places(CORE, core) else { return false };
    // Before version 2 there were no domains.
    all.extend(places(CORE2, core2).unwrap_or_default());
    for (place, function) in all {
        // SAFETY: a place for a pointer to a function of this type, by its number.
        unsafe { place.write(function.cast_mut().cast()) };
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_known_again_and_others_are_not() {
        static NAMES: Names<3> = Names::new();
        let (a, b) = (NAMES.add("a".into()), NAMES.add("b".into()));
        assert_ne!(a, b);
        assert_eq!(NAMES.add("a".into()), a);
        assert_eq!((NAMES.get(a), NAMES.get(b)), (Some((1, "a")), Some((2, "b"))));
        assert_eq!(NAMES.get(std::ptr::null()), None);
        assert_eq!(NAMES.get(a.wrapping_byte_add(1)), None);
        assert_eq!(NAMES.get(a.wrapping_byte_add(16)), None, "a place that is free");
        assert!(!NAMES.add("c".into()).is_null());
        assert!(NAMES.add("d".into()).is_null() && NAMES.add("e".into()).is_null());
        assert_eq!(NAMES.add("c".into()), a.wrapping_byte_add(16));
    }

    #[test]
    fn names_are_put_together_and_cut() {
        let mut text = Text::new();
        text.push(b"domain:");
        // SAFETY: strings that end with 0, or null.
        unsafe {
            text.push_wide([0xe4, 0x1f600, u32::MAX, 0].as_ptr());
            text.push_ascii(c"!".as_ptr());
            text.push_ascii(std::ptr::null());
            text.push_wide(std::ptr::null());
        }
        assert_eq!(text.to_text(), "domain:\u{e4}\u{1f600}\u{fffd}!");
        assert!(!text.cut);
        text.push(&[b'x'; LONGEST]);
        assert!(text.cut && text.bytes().len() == LONGEST);
    }

    #[test]
    fn attributes_are_as_the_header_has_them() {
        assert_eq!(std::mem::offset_of!(Attributes, message_type), 32);
        assert_eq!((std::mem::offset_of!(Attributes, message), size_of::<Attributes>()), (40, 48));
    }
}
