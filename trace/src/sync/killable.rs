//! loom's atomics on threads that may be killed. A thread can be made to stop for good before a given access to shared
//! memory. Only for the model checker.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::sync::atomic::Ordering;

loom::thread_local! {
    /// How many accesses the thread may still make. `None` means no limit.
    static REMAINING: Cell<Option<u32>> = Cell::new(None);
}

/// The panic payload of a killed thread.
struct Killed;

/// Runs `work` on a thread that is killed before access number `steps` (from 0). Returns whether it was killed before
/// it finished.
pub fn killed_before(steps: u32, work: impl FnOnce()) -> bool {
    REMAINING.with(|remaining| remaining.set(Some(steps)));
    let done = catch_unwind(AssertUnwindSafe(work));
    REMAINING.with(|remaining| remaining.set(None));
    match done {
        Ok(()) => false,
        Err(panic) if panic.is::<Killed>() => true,
        Err(panic) => resume_unwind(panic),
    }
}

/// Every access calls this first.
fn step() {
    REMAINING.with(|remaining| match remaining.get() {
        None => {}
        Some(0) => resume_unwind(Box::new(Killed)),
        Some(steps) => remaining.set(Some(steps - 1)),
    });
}

macro_rules! killable {
    ($name:ident, $value:ty) => {
        /// The counterpart of the atomic type in `std`.
        #[derive(Debug)]
        pub struct $name(loom::sync::atomic::$name);

        impl $name {
            /// A new atomic with this value.
            pub fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            /// Loads the value.
            pub fn load(&self, order: Ordering) -> $value {
                step();
                self.0.load(order)
            }

            /// Stores a value.
            pub fn store(&self, value: $value, order: Ordering) {
                step();
                self.0.store(value, order);
            }

            /// Adds `value` and returns the previous value.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                step();
                self.0.fetch_add(value, order)
            }

            /// Stores the maximum and returns the previous value.
            pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                step();
                self.0.fetch_max(value, order)
            }

            /// Stores `new` if the value is `current`, and returns the previous value.
            ///
            /// # Errors
            ///
            /// The value found, if it is not `current`.
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

killable!(AtomicU32, u32);
killable!(AtomicU64, u64);
