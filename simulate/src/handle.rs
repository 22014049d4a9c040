//! Handles for the program. They are opaque numbers and never pointers, so a stale handle is detected and never
//! dereferenced.

/// The kind of object that a handle names. The kind is part of the number, so handles of different kinds never collide.
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

/// Issues handles. No handle is issued twice.
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
    /// Issues a handle of `kind`. It looks like an aligned address in a range that the host never maps.
    pub fn deal(&mut self, kind: Kind) -> u64 {
        let n = self.next;
        self.next += 1;
        fixed(kind, n)
    }

    /// Issues a number that is unique in the process, for captures and streams.
    pub fn unique(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// The `n`-th handle of a kind, for objects that need no allocation of a handle (primary contexts, default pools).
pub fn fixed(kind: Kind, n: u64) -> u64 {
    ((kind as u64) << 48) | (n << 8)
}
