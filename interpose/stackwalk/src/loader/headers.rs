//! The program headers of a loaded object, and the end of the loader's list.

use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::find_object::{self, containing};
use super::objects::LoadedObject;
use super::r_debug::executable_headers;
use super::reading::Reading;
use super::symbols::Tables;

/// The first tables of an object, and its program headers, are closer to its start than this many bytes.
const MAX_HEADER_OFFSET: usize = 1 << 30;
/// The first of an object's tables follows its file header within this distance.
const MAX_FIRST_TABLE_OFFSET: usize = 64 << 10;

impl Reading {
    /// The object that contains `address`, if `matches` returns `true` for its program headers and bias. `None` if
    /// there is none.
    pub(crate) fn object_at(
        &self,
        address: usize,
        matches: impl Fn(&[libc::Elf64_Phdr], usize) -> bool,
    ) -> Option<LoadedObject> {
        let is_match = |object: &LoadedObject| {
            object.with_program_headers(self, |headers| matches(headers, object.bias)) == Some(true)
        };
        if find_object::is_available() {
            let found = containing(address)?;
            return self.object_of_link_map(found.link_map).filter(is_match);
        }
        self.objects().find(is_match)
    }
}

impl LoadedObject {
    /// Calls `visit` with the program headers. `None` if they are not found: in an object that is not mapped from the
    /// beginning of its file, and while an object is being unloaded.
    pub(crate) fn with_program_headers<T>(
        &self,
        reading: &Reading,
        visit: impl FnOnce(&[libc::Elf64_Phdr]) -> T,
    ) -> Option<T> {
        let (address, count) = if self.is_executable { executable_headers() } else { self.headers_in_file(reading)? };
        // Reads the last one through the kernel if necessary, so that the slice below is mapped.
        const SIZE: usize = size_of::<libc::Elf64_Phdr>();
        reading.read::<[u8; SIZE]>(address.checked_add(count.checked_sub(1)? * SIZE)?)?;
        // SAFETY: the object's file header, or the kernel for the executable, says that the headers are there. They are
        // in a segment that stays mapped while the object is loaded, and `reading` excludes an unload.
        Some(visit(unsafe { std::slice::from_raw_parts(with_exposed_provenance(address), count) }))
    }

    /// The address and the number of the program headers, from the file header.
    fn headers_in_file(&self, reading: &Reading) -> Option<(usize, usize)> {
        let headers_at = |start: usize| {
            let header = reading.read::<libc::Elf64_Ehdr>(start)?;
            let is_header = header.e_ident.starts_with(b"\x7fELF")
                && usize::from(header.e_phentsize) == size_of::<libc::Elf64_Phdr>()
                && (header.e_phoff as usize) < MAX_HEADER_OFFSET
                && header.e_phoff.is_multiple_of(8);
            is_header.then_some((start + header.e_phoff as usize, usize::from(header.e_phnum)))
        };
        if find_object::is_available() {
            let found = containing(self.dynamic).filter(|found| found.link_map == self.link_map)?;
            if let Some(headers) = headers_at(found.start) {
                return Some(headers);
            }
            // With gaps between its segments, each segment of an object is found by itself: the loader's own, whose
            // segments are aligned to 64 KiB on AArch64.
        }
        headers_at(self.likely_start(reading)?)
    }

    /// Where the object starts in memory, without [`containing`].
    ///
    /// Almost every library is linked for address 0, so it starts at its bias. One that is not has nothing mapped
    /// there. It is recognized by its tables, the first of which follows the file header closely.
    fn likely_start(&self, reading: &Reading) -> Option<usize> {
        let tables = Tables::of(reading, self)?;
        (tables.lowest_address().checked_sub(self.bias)? < MAX_FIRST_TABLE_OFFSET).then_some(self.bias)
    }
}

/// The end of the loader's list at some point in time. Detects that objects were loaded since.
pub struct ListEnd {
    link_map: AtomicUsize,
    dynamic: AtomicUsize,
}

impl ListEnd {
    /// No point in time.
    #[allow(clippy::new_without_default, reason = "lives in a static; a Default would be a second way to make one")]
    pub const fn new() -> ListEnd {
        ListEnd { link_map: AtomicUsize::new(0), dynamic: AtomicUsize::new(0) }
    }

    /// Whether no object was loaded since [`Self::update`]. `false` after [`Self::forget`].
    pub fn is_last(&self) -> bool {
        let (link_map, dynamic) = (self.link_map.load(Ordering::Relaxed), self.dynamic.load(Ordering::Relaxed));
        if link_map == 0 {
            return false;
        }
        let reading = Reading::begin();
        if find_object::is_available() {
            // The object is still loaded, so its record may be read.
            return containing(dynamic).is_some_and(|found| found.link_map == link_map)
                && reading.is_last(link_map) == Some(true);
        }
        reading.objects().last().is_some_and(|last| (last.link_map, last.dynamic) == (link_map, dynamic))
    }

    /// Stores the present end.
    pub fn update(&self) {
        let last = Reading::begin().objects().last();
        self.link_map.store(last.map_or(0, |last| last.link_map), Ordering::Relaxed);
        self.dynamic.store(last.map_or(0, |last| last.dynamic), Ordering::Relaxed);
    }

    /// Forgets the stored end, because objects were unloaded. Another object may get the same addresses.
    pub fn forget(&self) {
        self.link_map.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::objects::ObjectListMark;
    use std::ffi::{CStr, c_int, c_void};

    type Listed = Vec<(usize, Vec<u8>, Vec<(u32, u64)>)>;

    fn listed_by_the_c_library() -> Listed {
        unsafe extern "C" fn step(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
            // SAFETY: `dl_iterate_phdr` passes its own info and our vector, both valid during the call.
            let (info, list) = unsafe { (&*info, &mut *data.cast::<Listed>()) };
            // SAFETY: the loader keeps a C string and `dlpi_phnum` program headers there.
            let (name, headers) = unsafe {
                (
                    CStr::from_ptr(info.dlpi_name),
                    std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)),
                )
            };
            let headers = headers.iter().map(|header| (header.p_type, header.p_vaddr)).collect();
            list.push((info.dlpi_addr as usize, name.to_bytes().to_vec(), headers));
            0
        }
        let mut list = Listed::new();
        // SAFETY: the callback takes this vector, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(step), (&raw mut list).cast()) };
        list
    }

    fn listed_here() -> Listed {
        let reading = Reading::begin();
        let headers = |object: &LoadedObject| {
            object.with_program_headers(&reading, |headers| headers.iter().map(|h| (h.p_type, h.p_vaddr)).collect())
        };
        let listed = reading.objects().map(|object| {
            let path = object.with_path(&reading, |path| path.to_bytes().to_vec());
            (object.bias, path, headers(&object).unwrap_or_default())
        });
        listed.collect()
    }

    #[test]
    fn the_list_equals_that_of_dl_iterate_phdr() {
        let expected = listed_by_the_c_library();
        assert!(expected.len() >= 3, "{expected:?}");
        assert_eq!(listed_here(), expected);
        let before = ObjectListMark::now();
        // SAFETY: a C string. The library has no constructor that matters here.
        let library = unsafe { libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW) };
        // SAFETY: a C string. The library has no constructor that matters here.
        let other = unsafe { libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null() && !other.is_null());
        assert_ne!(ObjectListMark::now(), before);
        let end = ListEnd::new();
        assert!(!end.is_last());
        end.update();
        assert!(end.is_last());
        assert_eq!(listed_here(), listed_by_the_c_library());
        // SAFETY: the handle is valid and closed once.
        unsafe { libc::dlclose(other) };
        assert_eq!(listed_here(), listed_by_the_c_library());
    }

    #[test]
    fn a_library_starts_at_its_bias() {
        let reading = Reading::begin();
        let libc = reading.library(b"libc.so.6").expect("the C library");
        assert_eq!(libc.likely_start(&reading), Some(libc.bias));
        assert_eq!(libc.headers_in_file(&reading).unwrap().0, libc.bias + size_of::<libc::Elf64_Ehdr>());
        assert!(reading.library(b"no such library").is_none());
    }
}
