//! Handles of memory for other processes (CUDA IPC).

/// `CUipcMemHandle`, `cudaIpcMemHandle_t`: 64 opaque bytes, by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle([u64; 8]);

impl IpcHandle {
    /// The FNV-1a hash of the handle's bytes, by which the exporter's event and the importer's event name the same
    /// memory. Never 0, which means that there is no handle.
    pub(super) fn hash(&self) -> u64 {
        const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        let bytes = self.0.iter().flat_map(|word| word.to_le_bytes());
        bytes.fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME)).max(1)
    }
}

/// The hash of the handle that a call has written. 0 for null, as after a failed call.
pub(super) fn hash_at(handle: *const IpcHandle) -> u64 {
    if handle.is_null() {
        return 0;
    }
    // SAFETY: the original has just written to the same pointer and reported success.
    unsafe { handle.read_unaligned() }.hash()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a_of_the_64_bytes() {
        let bytes: [u8; 64] = std::array::from_fn(|at| at as u8);
        let words = std::array::from_fn(|at| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte])));
        let handle = IpcHandle(words);
        let mut expected = 14_695_981_039_346_656_037u64;
        for byte in bytes {
            expected = (expected ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        }
        assert_eq!((handle.hash(), hash_at(&handle), hash_at(std::ptr::null())), (expected, expected, 0));
    }
}
