//! The entry point of the fuzzer (`tests/fuzz`): an object whose memory is arbitrary. It ends before an unreadable
//! page, so that a read beyond its end faults.

use std::ptr::with_exposed_provenance_mut;
use std::sync::OnceLock;

use super::cfi;
use super::elf_objects::ElfObject;
use super::evaluator::Evaluator;
use super::rule::UnwindRule;

/// The largest size of an object in bytes.
const SIZE: usize = 1 << 18;
const PAGE: usize = 4096;

/// The address at which objects end.
fn objects_end() -> usize {
    static OBJECTS_END: OnceLock<usize> = OnceLock::new();
    *OBJECTS_END.get_or_init(|| {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: creates a new mapping and makes its last page unreadable.
        unsafe {
            let pages = libc::mmap(std::ptr::null_mut(), SIZE + PAGE, protection, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let end = pages.byte_add(SIZE);
            assert_eq!(libc::mprotect(end, PAGE, libc::PROT_NONE), 0);
            end.expose_provenance()
        }
    })
}

/// Reads an object's unwinding information for one address.
///
/// `data` starts with four 2-byte numbers: the position of `.eh_frame_hdr`, its length, the address to look up, and the
/// position of the notes. The object's memory follows.
pub fn unwind(data: &[u8]) {
    let Some((head, image)) = data.split_at_checked(8).filter(|(_, image)| image.len() <= SIZE) else { return };
    let number = |at: usize| u64::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let start = (objects_end() - image.len()) & !15;
    // SAFETY: the range is inside the mapping of `objects_end`, which only this thread uses.
    unsafe {
        let destination: *mut u8 = with_exposed_provenance_mut(start);
        std::ptr::copy_nonoverlapping(image.as_ptr(), destination, image.len());
        destination.add(image.len()).write_bytes(0, objects_end() - start - image.len());
    }
    let header = |kind, flags, address, size| libc::Elf64_Phdr {
        p_type: kind,
        p_flags: flags,
        p_offset: address,
        p_vaddr: address,
        p_paddr: address,
        p_filesz: size,
        p_memsz: size,
        p_align: 4,
    };
    let size = (objects_end() - start) as u64;
    let headers = [
        header(libc::PT_LOAD, libc::PF_R | libc::PF_X, 0, size),
        header(libc::PT_GNU_EH_FRAME, libc::PF_R, number(0), number(2)),
        header(libc::PT_NOTE, libc::PF_R, number(6), size.saturating_sub(number(6))),
    ];
    let object = ElfObject::new(start, &headers);
    let lookup = start + number(4) as usize;
    let rule = cfi::rule(&object, lookup, lookup + 1);
    assert_eq!(UnwindRule::unpack(rule.pack()), Some(rule));
    let code_range = cfi::code_range(&object, lookup);
    assert!(code_range.is_none_or(|found| (found.start..found.end).contains(&lookup)));
    Evaluator::find_in(&object, lookup);
    assert!(object.build_id().is_none_or(|id| id.len() <= image.len()));
}
