//! The memory that a CUDA call concerns, and its location.

/// The memory that a call allocates or releases. `size` is in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct CallMemory {
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) stream: u64,
    /// The device if the call itself names it: one more than its ordinal, or [`HOST`]. 0 means the current device.
    pub(super) location: u64,
}

/// The [`CallMemory::location`] of memory on the host.
pub(super) const HOST: u64 = u64::MAX;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AllocationProperties {
    kind: i32,
    handle_types: i32,
    location_kind: i32,
    location: i32,
    metadata: u64,
    flags: u64,
}

/// The location of the physical memory that these properties request, encoded as [`CallMemory::location`].
pub(super) fn location_of(properties: *const AllocationProperties) -> u64 {
    /// `CU_MEM_LOCATION_TYPE_DEVICE` of cuda.h. All larger values are locations on the host.
    const DEVICE: i32 = 1;
    if properties.is_null() {
        return 0;
    }
    // SAFETY: the original has just read the same pointer and reported success.
    let p = unsafe { properties.read_unaligned() };
    match p.location_kind {
        DEVICE => u64::try_from(p.location).map_or(0, |o| o + 1),
        kind if kind > DEVICE => HOST,
        _ => 0,
    }
}
