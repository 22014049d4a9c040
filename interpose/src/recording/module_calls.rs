//! Assigns ids to calls of `nn.Module`s, identified by (caller, module, class). [`memtrace_stackwalk`] finds the calls;
//! nodes and events refer to them.
//!
//! Calls are stored in the order in which they are found, which is the order in which a model calls its modules. So the
//! next call is usually next to the previous one. Otherwise a hash table finds it.
//!
//! A program may create modules without end. After [`MAX_OBJECTS`] calls, a new call is identified by its caller and
//! class alone. After [`MAX_CALLS`] it gets its caller's id.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_stackwalk::{Lock, ModuleCall};
use memtrace_trace::ids::ContextId;

use super::sparse_table::SparseTable;

/// At most this many calls have an id, and at most [`MAX_OBJECTS`] of those are identified by their object.
pub(crate) const MAX_CALLS: u32 = 1 << 16;
const MAX_OBJECTS: u32 = 1 << 15;
const SLOTS: usize = 2 * MAX_CALLS as usize;
/// How many slots of the hash table may hold a call.
const PROBES: usize = 64;
/// Words of a call: its object; its class; its caller and its id.
const WORDS: usize = 3;

/// The module calls of one process. Reading takes no lock.
pub(crate) struct ModuleCallIds {
    calls: SparseTable<WORDS>,
    /// The hash table. Each word has a part of the hash above and the index in `calls` plus one below.
    slots: SparseTable<1>,
    lock: Lock,
    count: AtomicU32,
}

/// The result of adding a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AddedCall {
    /// The call as it is stored. It has no object if it is identified by its class.
    pub(crate) call: ModuleCall,
    /// The call's id, or its caller's if there is no space.
    pub(crate) id: ContextId,
    /// Whether the id is new and must be defined in the trace.
    pub(crate) is_new: bool,
}

impl ModuleCallIds {
    pub(super) const fn new() -> ModuleCallIds {
        ModuleCallIds {
            calls: SparseTable::new(MAX_CALLS as usize),
            slots: SparseTable::new(SLOTS),
            lock: Lock::new(),
            count: AtomicU32::new(0),
        }
    }

    /// The id of the call at this index, if it is `call`.
    #[inline]
    fn id_at(&self, index: u32, call: ModuleCall) -> Option<ContextId> {
        let [object, class, value] = self.calls.entries().get(index as usize)?;
        let known = value.load(Ordering::Acquire);
        ((known >> 32) as u32 == call.caller.0
            && object.load(Ordering::Relaxed) == call.object as u64
            && class.load(Ordering::Relaxed) == call.class as u64
            // No call has the id 0, so this is an unused index.
            && known as u32 != 0)
            .then_some(ContextId(known as u32))
    }

    /// The slots that may hold a call, and the part of its hash that they store.
    fn slots(&self, call: ModuleCall) -> (impl Iterator<Item = &AtomicU64>, u64) {
        let slots = self.slots.entries();
        // Objects are aligned to 16 bytes and often adjacent.
        let spread = (call.object as u64 >> 4).wrapping_add(u64::from(call.caller.0) << 32);
        let spread = (spread ^ (call.class as u64).rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let start = (spread >> 40) as usize;
        let candidates = (0..PROBES).map_while(move |probe| slots.get((start + probe) % SLOTS).map(|[slot]| slot));
        (candidates, spread << 32)
    }

    /// The id of a call, if it has one. `*next` is the index to try first. On success it becomes the index after the
    /// call's.
    #[inline]
    pub(crate) fn find(&self, call: ModuleCall, next: &mut u32) -> Option<ContextId> {
        if let Some(id) = self.id_at(*next, call) {
            *next = next.wrapping_add(1);
            return Some(id);
        }
        let (index, id) = self.search(call)?;
        *next = index.wrapping_add(1);
        Some(id)
    }

    fn search(&self, call: ModuleCall) -> Option<(u32, ContextId)> {
        let (slots, part) = self.slots(call);
        for slot in slots {
            let known = slot.load(Ordering::Acquire);
            let index = (known as u32).checked_sub(1)?;
            if (known ^ part) >> 32 == 0
                && let Some(id) = self.id_at(index, call)
            {
                return Some((index, id));
            }
        }
        None
    }

    /// Assigns an id to a call, unless another thread has just done so. `next` returns a new id.
    #[cold]
    pub(crate) fn add(&self, call: ModuleCall, next: impl Fn() -> ContextId) -> AddedCall {
        // Without the lock the call is identified as its caller, which is counted.
        let Some(locked) = self.lock.lock() else { return AddedCall { call, id: call.caller, is_new: false } };
        let count = self.count.load(Ordering::Relaxed);
        let by_class = ModuleCall { object: 0, ..call };
        let exact = if count < MAX_OBJECTS { self.insert(call, &next) } else { None };
        let added = exact.or_else(|| {
            let known = self.search(by_class).map(|(_, id)| AddedCall { call: by_class, id, is_new: false });
            known.or_else(|| if count < MAX_CALLS { self.insert(by_class, &next) } else { None })
        });
        drop(locked);
        added.unwrap_or(AddedCall { call, id: call.caller, is_new: false })
    }

    /// How many calls have an id.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) as usize
    }

    /// The objects of the calls from this index on, without calls that are identified by their class alone.
    pub(crate) fn objects_from(&self, from: usize) -> impl Iterator<Item = usize> {
        let calls = self.calls.entries().get(from..self.count()).unwrap_or_default();
        calls.iter().map(|[object, ..]| object.load(Ordering::Relaxed) as usize).filter(|object| *object != 0)
    }

    /// The caller must hold the lock.
    fn insert(&self, call: ModuleCall, next: &impl Fn() -> ContextId) -> Option<AddedCall> {
        if let Some((_, id)) = self.search(call) {
            return Some(AddedCall { call, id, is_new: false });
        }
        let (mut slots, part) = self.slots(call);
        let slot = slots.find(|slot| slot.load(Ordering::Relaxed) == 0)?;
        let index = self.count.load(Ordering::Relaxed);
        let [object, class, value] = self.calls.entries().get(index as usize)?;
        let id = next();
        object.store(call.object as u64, Ordering::Relaxed);
        class.store(call.class as u64, Ordering::Relaxed);
        value.store(u64::from(call.caller.0) << 32 | u64::from(id.0), Ordering::Release);
        self.count.store(index + 1, Ordering::Release);
        slot.store(part | u64::from(index + 1), Ordering::Release);
        Some(AddedCall { call, id, is_new: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(caller: u32, object: usize, class: usize) -> ModuleCall {
        ModuleCall { caller: ContextId(caller), object: object * 16, class: class * 16 }
    }

    #[test]
    fn a_call_is_identified_by_caller_object_and_class() {
        let (calls, last) = (ModuleCallIds::new(), AtomicU32::new(0));
        let add = |call| calls.add(call, || ContextId(last.fetch_add(1, Ordering::Relaxed) + 1));
        for (n, one) in [call(0, 1, 1), call(1, 1, 1), call(0, 2, 1), call(0, 1, 2)].into_iter().enumerate() {
            assert_eq!(calls.find(one, &mut 0), None);
            let id = ContextId(n as u32 + 1);
            assert_eq!(add(one), AddedCall { call: one, id, is_new: true });
            assert_eq!(add(one), AddedCall { call: one, id, is_new: false });
            for expected in [n as u32, 0, 100, u32::MAX] {
                let mut next = expected;
                assert_eq!((calls.find(one, &mut next), next), (Some(id), n as u32 + 1), "expected at {expected}");
            }
        }
    }

    #[test]
    fn beyond_the_limit_a_call_is_identified_by_its_class() {
        let (calls, last) = (ModuleCallIds::new(), AtomicU32::new(0));
        let add = |call| calls.add(call, || ContextId(last.fetch_add(1, Ordering::Relaxed) + 1));
        let (mut exact, mut by_class) = (0, 0);
        for n in 0..200_000 {
            let added = add(call(0, n, 7));
            assert!(!added.id.is_none() || added.call.object != 0);
            exact += u32::from(added.call.object != 0);
            by_class += u32::from(added.call.object == 0 && !added.id.is_none());
        }
        assert!(exact <= MAX_OBJECTS + 1 && exact > MAX_OBJECTS * 9 / 10, "{exact}");
        assert_eq!(exact + by_class, 200_000);
        // Then classes without end, a new one for each call.
        for n in 0..200_000 {
            add(call(n % 1000, n as usize, n as usize + 100));
        }
        assert!(last.load(Ordering::Relaxed) <= MAX_CALLS, "{last:?}");
        // A call with an id keeps it.
        assert!(calls.find(call(0, 5, 7), &mut 0).is_some());
        let lost = add(call(3, 1, 999_999));
        assert_eq!((lost.id, lost.is_new), (ContextId(3), false));
    }
}
