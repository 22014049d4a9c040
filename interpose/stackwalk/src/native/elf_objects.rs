//! The loaded object of a code address, as the loader has mapped it.
//!
//! All queries hold a [`Reading`], during which `dlclose` waits. They take no lock of the loader. Nothing is cached, so
//! nothing can be stale. A query takes a few microseconds and is only made for new addresses.

use std::ffi::CStr;
use std::ops::Range;
use std::ptr::with_exposed_provenance;

use super::super::loader::Reading;
use super::super::pages::page_size;

/// A loaded object, during one query.
pub(crate) struct ElfObject<'a> {
    /// The load bias, to which the object's own addresses are relative.
    pub(crate) bias: usize,
    /// The path as the loader has it. Empty for the executable.
    pub(crate) path: &'a CStr,
    headers: &'a [libc::Elf64_Phdr],
}

impl<'a> ElfObject<'a> {
    /// An object with these program headers. Its segments must be mapped.
    pub(super) fn new(bias: usize, headers: &'a [libc::Elf64_Phdr]) -> ElfObject<'a> {
        ElfObject { bias, path: c"", headers }
    }

    fn address(&self, header: &libc::Elf64_Phdr) -> Range<usize> {
        let start = self.bias.wrapping_add(header.p_vaddr as usize);
        start..start.saturating_add(header.p_memsz as usize)
    }

    /// Where it starts in memory, rounded down to a page.
    pub(crate) fn start(&self) -> usize {
        let page = page_size();
        self.segments(libc::PT_LOAD).next().map_or(0, |first| self.address(first).start & !(page - 1))
    }

    fn segments(&self, kind: u32) -> impl Iterator<Item = &'a libc::Elf64_Phdr> + use<'a> {
        self.headers.iter().filter(move |header| header.p_type == kind)
    }

    /// The mapped, readable segment that contains `address` and has these flags.
    fn segment(&self, address: usize, flags: u32) -> Option<Range<usize>> {
        let flags = flags | libc::PF_R;
        self.segments(libc::PT_LOAD)
            .filter(|header| header.p_flags & flags == flags)
            .map(|header| self.address(header))
            .find(|range| range.contains(&address))
    }

    /// The code segment that contains `address`.
    pub(super) fn code(&self, address: usize) -> Option<&'a [u8]> {
        // SAFETY: this is a readable segment of an object that cannot be unloaded during this query.
        self.segment(address, libc::PF_X).map(|range| unsafe { bytes(range) })
    }

    /// The bytes from `address` to the end of its readable segment.
    pub(super) fn from(&self, address: usize) -> Option<&'a [u8]> {
        let segment = self.segment(address, 0)?;
        // SAFETY: this is part of a readable segment of an object that cannot be unloaded during this query.
        Some(unsafe { bytes(address..segment.end) })
    }

    /// The address and the bytes of `.eh_frame_hdr`.
    pub(super) fn eh_frame_hdr(&self) -> Option<(usize, &'a [u8])> {
        let range = self.address(self.segments(libc::PT_GNU_EH_FRAME).next()?);
        let mapped = self.from(range.start)?;
        Some((range.start, mapped.get(..range.len())?))
    }

    /// The GNU build id. `None` if there is none.
    pub(crate) fn build_id(&self) -> Option<&'a [u8]> {
        const NT_GNU_BUILD_ID: u32 = 3;
        let number = |bytes: &[u8], at: usize| {
            let word: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(word))
        };
        for header in self.segments(libc::PT_NOTE) {
            let range = self.address(header);
            let Some(mut notes) = self.from(range.start).and_then(|mapped| mapped.get(..range.len())) else { continue };
            // Name and description are padded to 4 bytes. Notes with an alignment of 8 contain no build id, and are
            // skipped with their own padding.
            let align = (header.p_align as usize).clamp(4, 8);
            while let (Some(name), Some(size), Some(kind)) = (number(notes, 0), number(notes, 4), number(notes, 8)) {
                let (name_end, size) = (12 + name as usize, size as usize);
                let start = name_end.next_multiple_of(align);
                let Some(description) = notes.get(start..start.saturating_add(size)) else { break };
                if kind == NT_GNU_BUILD_ID && notes.get(12..name_end) == Some(b"GNU\0".as_slice()) {
                    return Some(description);
                }
                let Some(rest) = notes.get((start + size).next_multiple_of(align)..) else { break };
                notes = rest;
            }
        }
        None
    }
}

/// # Safety
///
/// The range is mapped, readable and not written as long as the result is used.
unsafe fn bytes<'a>(range: Range<usize>) -> &'a [u8] {
    // SAFETY: the caller guarantees a mapped, readable and constant range.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance(range.start), range.len()) }
}

/// The result of `visit` for the object whose code contains `address`. `None` if there is none.
///
/// `dlclose` waits for `visit`, which must not call foreign code except the allocator.
pub(crate) fn with_code_at<T>(address: usize, visit: impl FnOnce(&ElfObject<'_>) -> T) -> Option<T> {
    find(address, |object| object.segment(address, libc::PF_X).is_some(), visit)
}

/// The result of `visit` for the object that starts at `start`. `None` if there is none. `dlclose` waits for `visit`.
pub(crate) fn with_start<T>(start: usize, visit: impl FnOnce(&ElfObject<'_>) -> T) -> Option<T> {
    find(start, |object| object.start() == start, visit)
}

/// The result of `visit` for the object that `matches`. It contains `address`.
fn find<T>(
    address: usize,
    matches: impl Fn(&ElfObject<'_>) -> bool,
    visit: impl FnOnce(&ElfObject<'_>) -> T,
) -> Option<T> {
    let reading = Reading::begin();
    let object = reading.object_at(address, |headers, bias| matches(&ElfObject::new(bias, headers)))?;
    object.with_program_headers(&reading, |headers| {
        object.with_path(&reading, |path| visit(&ElfObject { path, ..ElfObject::new(object.bias, headers) }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_code_has_the_build_id_that_readelf_prints() {
        let here = our_own_code_has_the_build_id_that_readelf_prints as *const () as usize;
        let found = with_code_at(here, |object| {
            assert!(object.code(here).is_some() && object.eh_frame_hdr().is_some());
            assert!(object.path.is_empty(), "the executable");
            assert!(with_start(object.start(), |same| same.bias == object.bias) == Some(true));
            object.build_id().map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        });
        let exe = std::env::current_exe().unwrap();
        let text = std::process::Command::new("readelf").arg("-n").arg(exe).output().expect("readelf").stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        let printed = text.lines().filter_map(|line| line.trim().strip_prefix("Build ID: ")).next_back();
        assert_eq!(found.as_ref().expect("an object").as_deref(), printed);
        assert!(with_code_at(0, |_| ()).is_none());
        assert!(with_code_at((&raw const found).addr(), |_| ()).is_none(), "the stack is no code");
    }
}
