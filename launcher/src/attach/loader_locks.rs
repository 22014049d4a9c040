//! Whether a thread of another process is loading a library, or reads the list of the loaded ones.
//!
//! `dlopen` would wait for it, with Python's GIL. The other thread may need the GIL: both would wait for ever.
//!
//! The loader's locks are in `_rtld_global`, whose layout differs between releases of glibc. They are the only
//! recursive mutexes in it, beside each other, and are found by that.

use super::tracee::Memory;

/// The words of a `pthread_mutex_t`.
const MUTEX_WORDS: usize = 5;
/// `PTHREAD_MUTEX_RECURSIVE_NP`, in the low half of the word.
const RECURSIVE: u64 = 1;
/// The largest size of `_rtld_global`, in bytes.
const MAX_SIZE: usize = 64 << 10;

/// The addresses of the locks. Empty if they are not found, and then they are not examined.
#[derive(Debug, Default)]
pub(super) struct LoaderLocks(Vec<u64>);

impl LoaderLocks {
    /// Finds the locks in the variable `_rtld_global`.
    pub(super) fn find(memory: &Memory, address: u64, size: u64) -> LoaderLocks {
        let mut bytes = vec![0; (size as usize).min(MAX_SIZE)];
        if memory.read(address, &mut bytes).is_err() {
            return LoaderLocks::default();
        }
        let words: Vec<u64> =
            bytes.chunks_exact(8).filter_map(|word| word.try_into().ok().map(u64::from_ne_bytes)).collect();
        LoaderLocks(positions(&words).into_iter().map(|at| address + 8 * at as u64).collect())
    }

    /// The addresses of the words that are 0 while no thread has the lock, 4 bytes each.
    pub(super) fn addresses(&self) -> &[u64] {
        &self.0
    }

    /// Whether a thread has one of them.
    pub(super) fn is_taken(&self, memory: &Memory) -> bool {
        self.0.iter().any(|address| memory.word(*address).is_ok_and(|word| word as u32 != 0))
    }
}

/// The positions of the recursive mutexes that are beside each other. Empty if there are several groups of them.
fn positions(words: &[u64]) -> Vec<usize> {
    let is_mutex = |at: usize| {
        let Some([state, owner, kind, before, after]) = words.get(at..at + MUTEX_WORDS) else { return false };
        let (lock, count) = (*state as u32, state >> 32);
        // 2 is a lock for which others wait.
        let is_state =
            if lock == 0 { count == 0 && *owner as u32 == 0 } else { lock <= 2 && count > 0 && *owner as u32 != 0 };
        is_state && *kind == RECURSIVE && *before == 0 && *after == 0
    };
    let starts = (0..words.len()).filter(|at| is_mutex(*at));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for at in starts {
        match groups.last_mut().filter(|group| group.last().is_some_and(|last| last + MUTEX_WORDS == at)) {
            Some(group) => group.push(at),
            None => groups.push(vec![at]),
        }
    }
    groups.retain(|group| group.len() > 1);
    if groups.len() == 1 { groups.remove(0) } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recursive_mutexes_beside_each_other_are_found_free_or_taken() {
        let free = [0, 0, RECURSIVE, 0, 0];
        let taken = [1 | 2 << 32, 77 | 1 << 32, RECURSIVE, 0, 0];
        let around = |locks: &[[u64; 5]]| [&[7, 0, 1, 0][..], &locks.concat(), &[1, 2, 3, 1, 0, 0]].concat();
        assert_eq!(positions(&around(&[free, free])), [4, 9]);
        assert_eq!(positions(&around(&[taken, free, taken])), [4, 9, 14]);
        assert_eq!(positions(&around(&[free])), [0; 0]);
        assert_eq!(positions(&[around(&[free, free]), around(&[free, free])].concat()), [0; 0]);
    }

    #[test]
    fn the_loader_of_this_process_is_busy_while_it_lists_objects() {
        // SAFETY: a C string. The symbol is a variable of the loader, whose address is not used to access it here.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_rtld_global".as_ptr()) }.addr() as u64;
        let memory = Memory::of(std::process::id()).unwrap();
        let locks = LoaderLocks::find(&memory, address, 4096);
        assert!(locks.0.len() >= 2, "{locks:?}");
        unsafe extern "C" fn visit(_: *mut libc::dl_phdr_info, _: usize, seen: *mut libc::c_void) -> libc::c_int {
            let memory = Memory::of(std::process::id()).unwrap();
            // SAFETY: the test passes this pair, which lives during the iteration.
            let (locks, is_taken) = unsafe { &mut *seen.cast::<(&LoaderLocks, bool)>() };
            *is_taken = locks.is_taken(&memory);
            1
        }
        let mut seen = (&locks, false);
        // SAFETY: the callback has this type, and takes this pair.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut seen).cast()) };
        assert!(seen.1);
        // Other threads of the tests may load objects now.
        while locks.is_taken(&memory) {}
    }
}
