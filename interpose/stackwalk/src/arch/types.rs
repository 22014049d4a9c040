//! Types that the modules of all architectures share.

/// The registers of a function.
pub(crate) struct StackRegisters {
    /// An address in its code.
    pub(crate) ip: usize,
    pub(crate) sp: usize,
    /// The frame pointer.
    pub(crate) bp: usize,
}

/// Where the kernel saves registers in the frame of a signal handler, in bytes from its stack pointer.
pub(crate) struct SavedBySignal {
    pub(crate) ip: i32,
    pub(crate) sp: i32,
    pub(crate) bp: i32,
    /// The link register.
    pub(crate) link: i32,
}
