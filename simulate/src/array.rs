//! CUDA arrays: opaque memory without a pitch, identified by a handle.

use crate::error::{Error, Result};

/// The extent, element size and number of mipmap levels of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Elements in a row.
    pub width: u64,
    /// Rows. 0 for a 1D array.
    pub height: u64,
    /// Slices. 0 for a 1D or 2D array.
    pub depth: u64,
    /// The size of one element in bytes, over all channels.
    pub element_bytes: u64,
    /// The number of mipmap levels. 1 for a plain array.
    pub levels: u32,
}

impl Shape {
    /// The size of all levels in bytes. Fails on an empty shape or on overflow.
    pub fn bytes(&self) -> Result<u64> {
        if self.width == 0 || self.element_bytes == 0 || self.levels == 0 {
            return Err(Error::InvalidValue);
        }
        let (mut w, mut h, mut d) = (self.width, self.height.max(1), self.depth.max(1));
        let mut total = 0u64;
        for _ in 0..self.levels.min(64) {
            let level = w.checked_mul(h).and_then(|n| n.checked_mul(d));
            let level = level.and_then(|n| n.checked_mul(self.element_bytes)).ok_or(Error::InvalidValue)?;
            total = total.checked_add(level).ok_or(Error::InvalidValue)?;
            (w, h, d) = ((w / 2).max(1), (h / 2).max(1), (d / 2).max(1));
        }
        Ok(total)
    }
}

/// The size of one channel of a `CUarray_format`, in bytes.
pub fn format_bytes(format: u32) -> Result<u64> {
    match format {
        0x01 | 0x08 => Ok(1),
        0x02 | 0x09 | 0x10 => Ok(2),
        0x03 | 0x0a | 0x20 => Ok(4),
        _ => Err(Error::InvalidValue),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let shape = |width, height, depth, levels| Shape { width, height, depth, element_bytes: 4, levels };
        assert_eq!(shape(16, 0, 0, 1).bytes(), Ok(64));
        assert_eq!(shape(16, 8, 2, 1).bytes(), Ok(1024));
        assert_eq!(shape(4, 4, 0, 3).bytes(), Ok(4 * (16 + 4 + 1)));
        assert_eq!(shape(0, 1, 1, 1).bytes(), Err(Error::InvalidValue));
        assert_eq!(shape(u64::MAX, 2, 1, 1).bytes(), Err(Error::InvalidValue));
    }
}
