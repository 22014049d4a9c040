//! CUDA IPC memory handles: 64 bytes that name a part of a process's memory file.

use crate::backing::Extent;
use crate::error::{Error, Result};
use std::io;

const MAGIC: u32 = 0x73696d63;

/// The content of the 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemHandle {
    /// The process that allocated the memory.
    pub pid: u32,
    /// The descriptor of its memory file in that process.
    pub descriptor: i32,
    /// The offset of the allocation in the file, in bytes.
    pub offset: u64,
    /// The size in bytes, a multiple of the page size.
    pub size: u64,
    /// The physical ordinal of the device on which it was allocated.
    pub device: u32,
}

impl MemHandle {
    /// A handle for an extent of this process.
    pub fn of(extent: &Extent, device: u32) -> Self {
        MemHandle {
            pid: std::process::id(),
            descriptor: extent.descriptor(),
            offset: extent.offset,
            size: extent.size,
            device,
        }
    }

    /// Encodes the handle for the program.
    pub fn encode(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&self.pid.to_le_bytes());
        put(&self.descriptor.to_le_bytes());
        put(&self.device.to_le_bytes());
        put(&self.offset.to_le_bytes());
        put(&self.size.to_le_bytes());
        bytes
    }

    /// Decodes a handle. Fails when the bytes are not one.
    pub fn decode(bytes: &[u8; 64]) -> Result<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | (u64::from(word(at + 4)) << 32);
        if word(0) != MAGIC {
            return Err(Error::InvalidValue);
        }
        Ok(MemHandle { pid: word(4), descriptor: word(8) as i32, device: word(12), offset: long(16), size: long(24) })
    }

    /// Opens the memory in the process that received the handle.
    pub fn open(&self) -> io::Result<Extent> {
        Extent::of_process(self.pid, self.descriptor, self.offset, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let handle = MemHandle { pid: 9, descriptor: 5, offset: 1 << 41, size: 4096, device: 3 };
        assert_eq!(MemHandle::decode(&handle.encode()), Ok(handle));
        assert!(MemHandle::decode(&[0; 64]).is_err());
    }
}
