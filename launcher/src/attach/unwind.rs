//! The functions that a stopped thread of another process is in, from the innermost one to the start of the thread.
//!
//! Only what the unwinding information of the loaded objects (`.eh_frame`) states is followed. A frame without it,
//! generated code for example, makes the whole stack unknown: nothing is guessed.
//!
//! The information is read from the files. The first page of each must be the same in memory.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, LittleEndian, Register, RegisterRule, UnwindContext,
    UnwindSection,
};
use memmap2::Mmap;
use object::Endianness;
use object::elf::{FileHeader64, PT_GNU_EH_FRAME, PT_LOAD, gnu_hash};
use object::read::elf::{FileHeader, ProgramHeader};

use super::arch::{self, PRESERVED, Registers};
use super::loaded_file::Mapping;
use super::tracee::Memory;

/// The largest number of frames. Each call of a Python function may have three.
const MAX_FRAMES: usize = 16_384;
/// The beginning of a file that is compared with memory, in bytes.
const COMPARED_BYTES: usize = 4096;
/// How much of a stack is read at once, in bytes.
const STACK_CHUNK: usize = 64 << 10;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;
type Header = FileHeader64<Endianness>;

/// A loaded object.
pub(super) struct Object {
    pub(super) path: Vec<u8>,
    /// Its executable mappings.
    code: Vec<Range<u64>>,
    /// `None` if its file is not the one that is loaded.
    file: Option<ObjectFile>,
}

struct ObjectFile {
    content: Mmap,
    bias: u64,
    /// Where `.eh_frame_hdr` and what follows `.eh_frame` are in the file, and their addresses before relocation.
    header: (Range<usize>, u64),
    frames: (Range<usize>, u64),
}

/// A function that a thread is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// The index of the object.
    pub(super) object: usize,
    /// Where the function begins.
    pub(super) function: u64,
    /// Whether the kernel has called it for a signal handler's return.
    pub(super) is_signal_return: bool,
}

/// The loaded objects of a process.
pub(super) struct Objects(pub(super) Vec<Object>);

impl Objects {
    /// The objects of these mappings.
    pub(super) fn read(pid: u32, mappings: &[Mapping], memory: &Memory) -> Objects {
        let mut objects: Vec<Object> = Vec::new();
        for mapping in mappings.iter().filter(|mapping| mapping.path.starts_with(b"/")) {
            let is_other = objects.last().is_none_or(|object| object.path != mapping.path);
            if is_other || mapping.offset == 0 {
                let open = || ObjectFile::open(pid, &mapping.path, mapping.start, memory);
                let file = (mapping.offset == 0).then(open).flatten();
                objects.push(Object { path: mapping.path.clone(), code: Vec::new(), file });
            }
            if let Some(object) = objects.last_mut().filter(|_| mapping.is_executable) {
                object.code.push(mapping.start..mapping.end);
            }
        }
        objects.retain(|object| !object.code.is_empty());
        Objects(objects)
    }

    fn at(&self, address: u64) -> Option<(usize, &ObjectFile)> {
        let mut objects = self.0.iter().enumerate();
        let (index, object) = objects.find(|(_, object)| object.code.iter().any(|code| code.contains(&address)))?;
        Some((index, object.file.as_ref()?))
    }

    /// The functions that a thread with these registers is in. `None` if that is not known up to the start of the
    /// thread.
    pub(super) fn frames(&self, memory: &Memory, registers: &Registers) -> Option<Vec<Frame>> {
        let mut context = Box::new(UnwindContext::new());
        let mut stack_pointer = registers.stack_pointer();
        let stack = StackReader::new(memory, stack_pointer);
        let mut ip = registers.instruction();
        let mut preserved = registers.preserved().map(Some);
        // Known in the innermost frame. A caller's own return address is on the stack.
        let mut link = registers.link();
        let mut frames: Vec<Frame> = Vec::new();
        while frames.len() < MAX_FRAMES {
            // A return address may be behind the function, if the call never returns.
            let at = if frames.is_empty() { ip } else { ip.checked_sub(1)? };
            let (index, file) = self.at(at)?;
            let (bases, frame_section) = (file.bases(), file.frame_section()?);
            let header = EhFrameHdr::from(file.header_section()?).parse(&bases, 8).ok()?;
            let in_file = at.wrapping_sub(file.bias);
            let get_cie = EhFrame::<Bytes<'_>>::cie_from_offset;
            let entry = header.table()?.fde_for_address(&frame_section, &bases, in_file, get_cie).ok()?;
            let row = entry.unwind_info_for_address(&frame_section, &bases, &mut context, in_file).ok()?;
            let function = entry.initial_address().wrapping_add(file.bias);
            frames.push(Frame { object: index, function, is_signal_return: entry.is_signal_trampoline() });
            let value_of = |register: Register| match register {
                arch::SP => Some(stack_pointer),
                arch::RA => link,
                // Others are known in the innermost frame, where they are not needed.
                _ => PRESERVED.iter().position(|one| *one == register).and_then(|at| *preserved.get(at)?),
            };
            let CfaRule::RegisterAndOffset { register, offset } = row.cfa() else { return None };
            let cfa = value_of(*register)?.checked_add_signed(*offset)?;
            let restored = |register: Register| match row.register(register) {
                Some(RegisterRule::Offset(offset)) => stack.word(cfa.checked_add_signed(offset)?),
                Some(RegisterRule::ValOffset(offset)) => cfa.checked_add_signed(offset),
                Some(RegisterRule::Register(other)) => value_of(other),
                // A function without a rule for a register preserves it.
                Some(RegisterRule::SameValue) | None => value_of(register),
                Some(_) => None,
            };
            let caller = match row.register(arch::RA) {
                Some(RegisterRule::Undefined) => return Some(frames),
                Some(_) => restored(arch::RA)?,
                None => link?,
            };
            let caller = arch::without_signature(caller);
            if caller == 0 {
                return Some(frames);
            }
            if cfa <= stack_pointer && frames.len() > 1 {
                return None;
            }
            preserved = PRESERVED.map(restored);
            (ip, stack_pointer, link) = (caller, cfa, None);
        }
        None
    }
}

impl Object {
    /// The name of its file.
    pub(super) fn file_name(&self) -> &[u8] {
        self.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// Whether it defines a function of this name for other objects. True if that is not known.
    pub(super) fn defines(&self, name: &[u8]) -> bool {
        self.file.as_ref().and_then(|file| file.defines(name)).unwrap_or(true)
    }

    /// The addresses of the exported functions that have one of these names, in all versions.
    pub(super) fn functions(&self, names: &[&str]) -> Vec<u64> {
        self.file.as_ref().and_then(|file| file.functions(names)).unwrap_or_default()
    }

    /// Whether an exported function begins at this address.
    pub(super) fn exports(&self, function: u64) -> bool {
        self.file.as_ref().is_none_or(|file| file.exports(function).unwrap_or(true))
    }
}

impl ObjectFile {
    fn open(pid: u32, path: &[u8], first: u64, memory: &Memory) -> Option<ObjectFile> {
        let path = PathBuf::from(format!("/proc/{pid}/root")).join(OsStr::from_bytes(path.strip_prefix(b"/")?));
        // SAFETY: if somebody truncates the file meanwhile, this process ends, and nothing else.
        let content = unsafe { Mmap::map(&open_regular(&path)?) }.ok()?;
        let length = content.len().min(COMPARED_BYTES);
        let mut here = vec![0; length];
        memory.read(first, &mut here).ok().filter(|()| content.get(..length) == Some(&here))?;
        let header = Header::parse(&*content).ok()?;
        let endian = header.endian().ok()?;
        let parts = header.program_headers(endian, &*content).ok()?;
        let load = |header: &&_| ProgramHeader::p_type(*header, endian) == PT_LOAD;
        let lowest = parts.iter().find(load)?;
        let index = parts.iter().find(|part| part.p_type(endian) == PT_GNU_EH_FRAME)?;
        let (at, size, address) =
            (index.p_offset(endian) as usize, index.p_filesz(endian) as usize, index.p_vaddr(endian));
        let header = (at..at.checked_add(size)?, address);
        let bases = BaseAddresses::default().set_eh_frame_hdr(address);
        let section = EhFrameHdr::new(content.get(header.0.clone())?, LittleEndian);
        let gimli::Pointer::Direct(frames) = section.parse(&bases, 8).ok()?.eh_frame_ptr() else { return None };
        let segment = parts
            .iter()
            .filter(load)
            .find(|part| frames.checked_sub(part.p_vaddr(endian)).is_some_and(|at| at < part.p_filesz(endian)))?;
        let start = segment.p_offset(endian) + (frames - segment.p_vaddr(endian));
        let end = segment.p_offset(endian) + segment.p_filesz(endian);
        let frames = (start as usize..end as usize, frames);
        let bias = first.wrapping_sub(lowest.p_vaddr(endian).wrapping_sub(lowest.p_offset(endian)));
        Some(ObjectFile { content, bias, header, frames })
    }

    fn bases(&self) -> BaseAddresses {
        BaseAddresses::default().set_eh_frame_hdr(self.header.1).set_eh_frame(self.frames.1)
    }

    fn header_section(&self) -> Option<Bytes<'_>> {
        Some(EndianSlice::new(self.content.get(self.header.0.clone())?, LittleEndian))
    }

    fn frame_section(&self) -> Option<EhFrame<Bytes<'_>>> {
        let mut section = EhFrame::new(self.content.get(self.frames.0.clone())?, LittleEndian);
        section.set_vendor(arch::VENDOR);
        Some(section)
    }

    /// Calls `visit` with the name and address of each exported symbol that the object defines.
    fn each_symbol(&self, mut visit: impl FnMut(&[u8], u64)) -> Option<()> {
        let header = Header::parse(&*self.content).ok()?;
        let endian = header.endian().ok()?;
        let sections = header.sections(endian, &*self.content).ok()?;
        let symbols = sections.symbols(endian, &*self.content, object::elf::SHT_DYNSYM).ok()?;
        for symbol in symbols.iter() {
            use object::read::elf::Sym;
            if !symbol.is_undefined(endian) {
                visit(symbols.symbol_name(endian, symbol).ok()?, symbol.st_value(endian).wrapping_add(self.bias));
            }
        }
        Some(())
    }

    fn functions(&self, names: &[&str]) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        self.each_symbol(|name, address| {
            if names.iter().any(|one| one.as_bytes() == name) {
                found.push(address);
            }
        })?;
        Some(found)
    }

    fn exports(&self, function: u64) -> Option<bool> {
        let mut is_exported = false;
        self.each_symbol(|_, address| is_exported |= address == function)?;
        Some(is_exported)
    }

    fn defines(&self, name: &[u8]) -> Option<bool> {
        use object::read::elf::Sym;
        let header = Header::parse(&*self.content).ok()?;
        let endian = header.endian().ok()?;
        let sections = header.sections(endian, &*self.content).ok()?;
        let Some((table, section)) = sections.gnu_hash(endian, &*self.content).ok()? else {
            let mut is_defined = false;
            self.each_symbol(|one, _| is_defined |= one == name)?;
            return Some(is_defined);
        };
        let symbols = sections.symbol_table_by_index(endian, &*self.content, section).ok()?;
        let found = table.find(endian, name, gnu_hash(name), None, &symbols, &Default::default());
        Some(found.is_some_and(|(_, symbol)| !symbol.is_undefined(endian)))
    }
}

/// Opens a file for reading, unless it is a pipe or a device.
fn open_regular(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// Words of a stack.
struct StackReader<'a> {
    memory: &'a Memory,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> StackReader<'a> {
    fn new(memory: &'a Memory, start: u64) -> StackReader<'a> {
        let mut bytes = vec![0; STACK_CHUNK];
        let length = memory.read_some(start, &mut bytes);
        bytes.truncate(length);
        StackReader { memory, start, bytes }
    }

    fn word(&self, address: u64) -> Option<u64> {
        let at = address.checked_sub(self.start).and_then(|at| usize::try_from(at).ok());
        let known = at.and_then(|at| self.bytes.get(at..at.checked_add(8)?)?.try_into().ok()).map(u64::from_ne_bytes);
        known.or_else(|| self.memory.word(address).ok())
    }
}
