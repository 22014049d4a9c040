//! The loaded object that a code address belongs to, as the loader has mapped it.
//!
//! Everything is asked inside `dl_iterate_phdr`, which keeps objects from being unloaded meanwhile; nothing is kept, so
//! nothing can be out of date. A few microseconds, for addresses that are new.

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::ptr::with_exposed_provenance;

/// A loaded object, during one look at it.
pub(crate) struct Object<'a> {
    /// What its own addresses are relative to.
    pub(crate) bias: usize,
    /// Its path as the loader has it; empty for the executable.
    pub(crate) path: &'a CStr,
    headers: &'a [libc::Elf64_Phdr],
}

impl<'a> Object<'a> {
    /// The object with these program headers, whose segments are mapped.
    pub(super) fn new(bias: usize, headers: &'a [libc::Elf64_Phdr]) -> Object<'a> {
        Object { bias, path: c"", headers }
    }

    fn address(&self, header: &libc::Elf64_Phdr) -> Range<usize> {
        let start = self.bias.wrapping_add(header.p_vaddr as usize);
        start..start.saturating_add(header.p_memsz as usize)
    }

    /// Where it starts in memory.
    pub(crate) fn start(&self) -> usize {
        const PAGE: usize = 4096;
        self.segments(libc::PT_LOAD).next().map_or(0, |first| self.address(first).start & !(PAGE - 1))
    }

    fn segments(&self, kind: u32) -> impl Iterator<Item = &'a libc::Elf64_Phdr> + use<'a> {
        self.headers.iter().filter(move |header| header.p_type == kind)
    }

    /// The mapped, readable bytes around `address`: its whole segment.
    fn segment(&self, address: usize, flags: u32) -> Option<Range<usize>> {
        let flags = flags | libc::PF_R;
        self.segments(libc::PT_LOAD)
            .filter(|header| header.p_flags & flags == flags)
            .map(|header| self.address(header))
            .find(|range| range.contains(&address))
    }

    /// The code that `address` lies in, from the start of its segment to its end.
    pub(super) fn code(&self, address: usize) -> Option<&'a [u8]> {
        // SAFETY: a readable segment of an object that cannot be unloaded during this look.
        self.segment(address, libc::PF_X).map(|range| unsafe { bytes(range) })
    }

    /// From `address` to the end of its readable segment.
    pub(super) fn from(&self, address: usize) -> Option<&'a [u8]> {
        let segment = self.segment(address, 0)?;
        // SAFETY: as in `code`.
        Some(unsafe { bytes(address..segment.end) })
    }

    /// Where `.eh_frame_hdr` is.
    pub(super) fn eh_frame_hdr(&self) -> Option<(usize, &'a [u8])> {
        let range = self.address(self.segments(libc::PT_GNU_EH_FRAME).next()?);
        let mapped = self.from(range.start)?;
        Some((range.start, mapped.get(..range.len())?))
    }

    /// Its GNU build id.
    pub(crate) fn build_id(&self) -> Option<&'a [u8]> {
        const NT_GNU_BUILD_ID: u32 = 3;
        let number = |bytes: &[u8], at: usize| {
            let word: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(word))
        };
        for header in self.segments(libc::PT_NOTE) {
            let range = self.address(header);
            let Some(mut notes) = self.from(range.start).and_then(|mapped| mapped.get(..range.len())) else { continue };
            // Name and description are padded to 4 bytes; notes of objects with alignment 8 hold no build id, but are
            // stepped over in their own way.
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
/// The range is mapped and readable, and not written, as long as the result is used.
unsafe fn bytes<'a>(range: Range<usize>) -> &'a [u8] {
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance(range.start), range.len()) }
}

struct Search<W, F, T> {
    wanted: W,
    visit: Option<F>,
    found: Option<T>,
}

/// What `visit` makes of the object whose code `address` lies in; `None` when there is none. `visit` runs under the loader's
/// lock: it may call nothing foreign but the allocator.
pub(crate) fn with_code_at<T>(address: usize, visit: impl FnOnce(&Object<'_>) -> T) -> Option<T> {
    find(|object| object.segment(address, libc::PF_X).is_some(), visit)
}

/// The same, of the object that starts at `start`.
pub(crate) fn with_start<T>(start: usize, visit: impl FnOnce(&Object<'_>) -> T) -> Option<T> {
    find(|object| object.start() == start, visit)
}

fn find<T, W: FnMut(&Object<'_>) -> bool, F: FnOnce(&Object<'_>) -> T>(wanted: W, visit: F) -> Option<T> {
    unsafe extern "C" fn step<T, W: FnMut(&Object<'_>) -> bool, F: FnOnce(&Object<'_>) -> T>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr passes its own info and our pointer, both valid for the call.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<W, F, T>>()) };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: the loader gives dlpi_phnum program headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let mut object = Object::new(info.dlpi_addr as usize, headers);
        if !(search.wanted)(&object) {
            return 0;
        }
        if !info.dlpi_name.is_null() {
            // SAFETY: a C string of the loader's, which lives as long as the object.
            object.path = unsafe { CStr::from_ptr(info.dlpi_name) };
        }
        search.found = search.visit.take().map(|visit| visit(&object));
        1
    }
    fn step_of<T, W: FnMut(&Object<'_>) -> bool, F: FnOnce(&Object<'_>) -> T>(
        _: &Search<W, F, T>,
    ) -> unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int {
        step::<T, W, F>
    }
    let mut search = Search { wanted, visit: Some(visit), found: None };
    // SAFETY: the callback matches the type that `data` points at and neither outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(step_of(&search)), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_code_is_found_with_the_build_id_that_readelf_prints() {
        let here = our_own_code_is_found_with_the_build_id_that_readelf_prints as *const () as usize;
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
