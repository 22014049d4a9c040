//! Handles given to the program: opaque numbers, never pointers, so that a stale one is found out and not followed.

/// What a handle names; the kind is part of the number, so kinds never collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// `CUcontext`
    Context = 0x51,
    /// `CUstream`
    Stream = 0x52,
    /// `CUevent`
    Event = 0x53,
    /// `CUgraph`
    Graph = 0x54,
    /// `CUgraphExec`
    GraphExec = 0x55,
    /// `CUmemoryPool`
    Pool = 0x56,
    /// `CUmemGenericAllocationHandle`
    Physical = 0x57,
    /// `CUarray` and `CUmipmappedArray`
    Array = 0x58,
    /// `CUmodule` and `CUlibrary`
    Module = 0x59,
}

/// Deals out handles; none is ever used twice.
#[derive(Debug)]
pub struct Handles {
    next: u64,
}

impl Default for Handles {
    fn default() -> Self {
        Handles { next: 1 }
    }
}

impl Handles {
    /// A new handle of `kind`: looks like an aligned address of a range the host never maps.
    pub fn deal(&mut self, kind: Kind) -> u64 {
        let n = self.next;
        self.next += 1;
        fixed(kind, n)
    }

    /// A number that is unique in the process (capture and stream identifiers).
    pub fn unique(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// The `n`-th handle of a kind, for those that are known beforehand (primary contexts, default pools).
pub fn fixed(kind: Kind, n: u64) -> u64 {
    ((kind as u64) << 48) | (n << 8)
}
