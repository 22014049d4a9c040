//! loom's atomics on threads that may die: a thread can be told to stop for good before its so-manieth access to shared memory, as
//! one that is killed does. Only under the model checker.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::sync::atomic::Ordering;

loom::thread_local! {
    /// Accesses that the thread has left; `None`: it does not die.
    static LEFT: Cell<Option<u32>> = Cell::new(None);
}

/// What a thread that is killed unwinds with.
struct Killed;

/// Does `work` on a thread that is killed before access number `steps` (from 0). Whether it was killed before it was done.
pub fn killed_before(steps: u32, work: impl FnOnce()) -> bool {
    LEFT.with(|left| left.set(Some(steps)));
    let done = catch_unwind(AssertUnwindSafe(work));
    LEFT.with(|left| left.set(None));
    match done {
        Ok(()) => false,
        Err(panic) if panic.is::<Killed>() => true,
        Err(panic) => resume_unwind(panic),
    }
}

/// Every access passes here.
fn step() {
    LEFT.with(|left| match left.get() {
        None => {}
        Some(0) => resume_unwind(Box::new(Killed)),
        Some(steps) => left.set(Some(steps - 1)),
    });
}

macro_rules! mortal {
    ($name:ident, $value:ty) => {
        /// As `std`'s.
        #[derive(Debug)]
        pub struct $name(loom::sync::atomic::$name);

        impl $name {
            /// A new one.
            pub fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            /// Loads.
            pub fn load(&self, order: Ordering) -> $value {
                step();
                self.0.load(order)
            }

            /// Stores.
            pub fn store(&self, value: $value, order: Ordering) {
                step();
                self.0.store(value, order);
            }

            /// Adds; the value before.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                step();
                self.0.fetch_add(value, order)
            }

            /// Keeps the larger; the value before.
            pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                step();
                self.0.fetch_max(value, order)
            }

            /// Stores `new` where `current` is.
            ///
            /// # Errors
            /// What is there, when it is something else.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                step();
                self.0.compare_exchange(current, new, success, failure)
            }
        }
    };
}

mortal!(AtomicU32, u32);
mortal!(AtomicU64, u64);
