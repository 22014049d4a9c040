//! The code that a thread of the traced process runs once: it loads our library, calls a function of it, and goes on where
//! it was.
//!
//! The thread runs it without a tracer, so that neither the end of the launcher nor a signal disturbs it. All registers
//! are restored: within one library, compilers may rely on registers that a function is allowed to change.

use std::arch::global_asm;
use std::mem::offset_of;

/// What the code reads and writes, directly after it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    /// 0, and 1 as soon as the thread has left the code except for its last instruction.
    pub(super) is_done: u64,
    /// Where the thread goes on.
    pub(super) resume_at: u64,
    /// The C library's functions.
    pub(super) dlopen: u64,
    pub(super) dlsym: u64,
    pub(super) dlerror: u64,
    pub(super) errno_location: u64,
    /// Strings: the library's path, the function's name and its argument.
    pub(super) path: u64,
    pub(super) function: u64,
    pub(super) argument: u64,
    /// Zeroed memory for `xsave`, aligned to 64 bytes.
    pub(super) xsave: u64,
    pub(super) errno: u64,
    /// The address that `dlopen` has returned.
    pub(super) handle: u64,
    /// The result of the function.
    pub(super) result: u64,
    /// The message of `dlerror`, if the library could not be loaded. It ends with 0.
    pub(super) error: [u8; 512],
}

impl Data {
    pub(super) const EMPTY: Data = Data {
        is_done: 0,
        resume_at: 0,
        dlopen: 0,
        dlsym: 0,
        dlerror: 0,
        errno_location: 0,
        path: 0,
        function: 0,
        argument: 0,
        xsave: 0,
        errno: 0,
        handle: 0,
        result: 0,
        error: [0; 512],
    };

    /// The bytes of the structure.
    pub(super) fn to_bytes(self) -> [u8; size_of::<Data>()] {
        // SAFETY: the structure has no padding, and both types have the same size.
        unsafe { std::mem::transmute(self) }
    }

    /// The structure with these bytes.
    pub(super) fn from_bytes(bytes: [u8; size_of::<Data>()]) -> Data {
        // SAFETY: every bit pattern is a valid structure, and both types have the same size.
        unsafe { std::mem::transmute(bytes) }
    }
}

/// `RTLD_DEEPBIND`: the library's own functions come before those of the same names that the program has loaded.
const DLOPEN_FLAGS: i32 = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;

global_asm!(
    ".pushsection .rodata.memtrace_trampoline,\"a\",@progbits",
    ".p2align 6",
    "memtrace_trampoline:",
    // The space below the stack pointer may be in use (the red zone of the x86-64 ABI).
    "lea rsp, [rsp - 256]",
    "pushfq",
    "push rax", "push rbx", "push rcx", "push rdx", "push rsi", "push rdi", "push rbp", "push r8",
    "push r9", "push r10", "push r11", "push r12", "push r13", "push r14", "push r15",
    "mov rbp, rsp",
    "and rsp, -64",
    "cld",
    "lea rbx, [rip + memtrace_trampoline_data]",
    "mov rdi, [rbx + {xsave}]",
    "mov eax, -1",
    "mov edx, -1",
    "xsave64 [rdi]",
    "call [rbx + {errno_location}]",
    "mov eax, [rax]",
    "mov [rbx + {errno}], rax",
    "mov rdi, [rbx + {path}]",
    "mov esi, {flags}",
    "call [rbx + {dlopen}]",
    "mov [rbx + {handle}], rax",
    "test rax, rax",
    "jz 2f",
    "mov rdi, rax",
    "mov rsi, [rbx + {function}]",
    "call [rbx + {dlsym}]",
    "test rax, rax",
    "jz 2f",
    "mov rdi, [rbx + {argument}]",
    "call rax",
    "mov [rbx + {result}], rax",
    "jmp 5f",
    // Copies the message of `dlerror`.
    "2:",
    "call [rbx + {dlerror}]",
    "test rax, rax",
    "jz 5f",
    "lea rdi, [rbx + {error}]",
    "mov ecx, 511",
    "3:",
    "mov dl, [rax]",
    "mov [rdi], dl",
    "test dl, dl",
    "jz 5f",
    "inc rax",
    "inc rdi",
    "dec ecx",
    "jnz 3b",
    "5:",
    "call [rbx + {errno_location}]",
    "mov ecx, [rbx + {errno}]",
    "mov [rax], ecx",
    "mov rdi, [rbx + {xsave}]",
    "mov eax, -1",
    "mov edx, -1",
    "xrstor64 [rdi]",
    "mov rsp, rbp",
    "pop r15", "pop r14", "pop r13", "pop r12", "pop r11", "pop r10", "pop r9", "pop r8",
    "pop rbp", "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rbx", "pop rax",
    "popfq",
    "lea rsp, [rsp + 256]",
    "mov dword ptr [rip + memtrace_trampoline_data + {is_done}], 1",
    "jmp [rip + memtrace_trampoline_data + {resume_at}]",
    ".p2align 6",
    "memtrace_trampoline_data:",
    ".popsection",
    flags = const DLOPEN_FLAGS,
    is_done = const offset_of!(Data, is_done),
    resume_at = const offset_of!(Data, resume_at),
    dlopen = const offset_of!(Data, dlopen),
    dlsym = const offset_of!(Data, dlsym),
    dlerror = const offset_of!(Data, dlerror),
    errno_location = const offset_of!(Data, errno_location),
    path = const offset_of!(Data, path),
    function = const offset_of!(Data, function),
    argument = const offset_of!(Data, argument),
    xsave = const offset_of!(Data, xsave),
    errno = const offset_of!(Data, errno),
    handle = const offset_of!(Data, handle),
    result = const offset_of!(Data, result),
    error = const offset_of!(Data, error),
);

unsafe extern "C" {
    static memtrace_trampoline: u8;
    static memtrace_trampoline_data: u8;
}

/// The code.
fn code() -> &'static [u8] {
    // SAFETY: both symbols are in one section, which is never changed, and the second one follows the first.
    unsafe {
        let start = &raw const memtrace_trampoline;
        std::slice::from_raw_parts(start, (&raw const memtrace_trampoline_data).addr() - start.addr())
    }
}

/// The bytes that `xsave` may write on this machine. 0 if the processor has no `xsave` that programs may use.
fn xsave_size() -> usize {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const OSXSAVE: u32 = 1 << 27;
    let has_xsave = __cpuid(1).ecx & OSXSAVE != 0;
    if has_xsave { __cpuid_count(0xd, 0).ebx as usize } else { 0 }
}

/// The code with its data and its strings, for memory of the traced process.
pub(super) struct Image {
    pub(super) bytes: Vec<u8>,
    /// Where the data is, relative to the beginning.
    pub(super) data_at: u64,
}

/// The memory that an image with strings of this length needs, in bytes. `None` if this processor has no `xsave`.
pub(super) fn size_of_image(strings: usize) -> Option<u64> {
    let state = Some(xsave_size()).filter(|size| *size > 0)?;
    Some((code().len() + size_of::<Data>() + strings + 64 + state).next_multiple_of(4096) as u64)
}

/// The image for memory at `base`. `data` has the addresses of functions.
pub(super) fn image(base: u64, data: Data, [path, function, argument]: [&[u8]; 3]) -> Option<Image> {
    let mut bytes = code().to_vec();
    let data_at = bytes.len();
    bytes.resize(data_at + size_of::<Data>(), 0);
    let mut string = |text: &[u8]| {
        let address = base + bytes.len() as u64;
        bytes.extend_from_slice(text);
        bytes.push(0);
        address
    };
    let (path, function, argument) = (string(path), string(function), string(argument));
    let xsave = base + bytes.len().next_multiple_of(64) as u64;
    let data = Data { path, function, argument, xsave, ..data }.to_bytes();
    bytes.get_mut(data_at..data_at + data.len())?.copy_from_slice(&data);
    Some(Image { bytes, data_at: data_at as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::sync::atomic::{AtomicU64, Ordering};

    static ARGUMENT: AtomicU64 = AtomicU64::new(0);

    unsafe extern "C" fn open(_path: *const u8, flags: i32) -> u64 {
        if flags == DLOPEN_FLAGS { 7 } else { 0 }
    }
    unsafe extern "C" fn fail(_path: *const u8, _flags: i32) -> u64 {
        0
    }
    unsafe extern "C" fn symbol(_handle: u64, _name: *const u8) -> unsafe extern "C" fn(*const i8) -> u64 {
        unsafe extern "C" fn called(argument: *const i8) -> u64 {
            // SAFETY: the test passes a C string.
            let text = unsafe { CStr::from_ptr(argument) }.to_bytes().len() as u64;
            ARGUMENT.store(text, Ordering::Relaxed);
            // SAFETY: this thread's `errno`.
            unsafe { *libc::__errno_location() = 99 };
            42
        }
        called
    }
    unsafe extern "C" fn error() -> *const i8 {
        c"no such file".as_ptr()
    }

    /// Runs the code as a function: its caller's registers must survive, and it returns where `resume_at` leads.
    fn run(dlopen: unsafe extern "C" fn(*const u8, i32) -> u64) -> Data {
        let size = size_of_image(64).unwrap() as usize;
        // SAFETY: a new mapping, whose code is called as long as it is mapped. `ret` at the end of the page returns to
        // the caller.
        unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let page = libc::mmap(
                std::ptr::null_mut(),
                size + 4096,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(page, libc::MAP_FAILED);
            let base = page.expose_provenance() as u64;
            let at = |offset: usize| page.cast::<u8>().add(offset);
            at(size).write(0xc3);
            let data = Data {
                resume_at: base + size as u64,
                dlopen: dlopen as *const () as u64,
                dlsym: symbol as *const () as u64,
                dlerror: error as *const () as u64,
                errno_location: libc::__errno_location as *const () as u64,
                ..Data::EMPTY
            };
            let image = image(base, data, [b"/lib.so", b"f", b"options"]).unwrap();
            assert!(image.bytes.len() < size);
            at(0).copy_from_nonoverlapping(image.bytes.as_ptr(), image.bytes.len());
            *libc::__errno_location() = 5;
            let (mut sum, mut vector) = (0x1234u64, 1.5f64);
            std::arch::asm!(
                "mov r10, 77",
                "call {page}",
                "add rax, r10",
                page = in(reg) page,
                inout("rax") sum,
                inout("xmm7") vector,
                out("r10") _,
            );
            assert_eq!((sum, vector, *libc::__errno_location()), (0x1234 + 77, 1.5, 5));
            let data = at(image.data_at as usize).cast::<[u8; size_of::<Data>()]>().read();
            libc::munmap(page, size + 4096);
            Data::from_bytes(data)
        }
    }

    #[test]
    fn the_function_is_called_and_all_registers_are_restored() {
        let data = run(open);
        assert_eq!((data.is_done, data.handle, data.result), (1, 7, 42));
        assert_eq!(ARGUMENT.load(Ordering::Relaxed), 7);
        let data = run(fail);
        assert_eq!((data.is_done, data.handle), (1, 0));
        assert!(data.error.starts_with(b"no such file\0"));
    }
}
