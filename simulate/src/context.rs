//! Contexts and the device of each. The handles of primary contexts are fixed, and other contexts get new handles.

use crate::error::{Error, Result};
use crate::handle::{Handles, Kind, fixed};
use std::collections::HashMap;

const PRIMARY: u64 = 1 << 32;

/// The contexts that the program created in addition to the primary ones.
#[derive(Debug, Default)]
pub struct Contexts {
    created: HashMap<u64, usize>,
}

/// The handle of a device's primary context.
pub fn primary(ordinal: usize) -> u64 {
    fixed(Kind::Context, PRIMARY + ordinal as u64)
}

impl Contexts {
    /// Creates a context and returns its handle.
    pub fn create(&mut self, ordinal: usize, handles: &mut Handles) -> u64 {
        let handle = handles.deal(Kind::Context);
        self.created.insert(handle, ordinal);
        handle
    }

    /// Destroys a context and returns its device.
    pub fn destroy(&mut self, handle: u64) -> Result<usize> {
        self.created.remove(&handle).ok_or(Error::InvalidContext)
    }

    /// The device of a context, primary or not. `devices` is the number of devices.
    pub fn device(&self, handle: u64, devices: usize) -> Result<usize> {
        let known = self.created.get(&handle).copied();
        known.or_else(|| (0..devices).find(|&d| primary(d) == handle)).ok_or(Error::InvalidContext)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primary_and_created_contexts_are_distinct() {
        let mut handles = Handles::default();
        let mut contexts = Contexts::default();
        let own = contexts.create(1, &mut handles);
        assert_eq!(contexts.device(own, 2), Ok(1));
        assert_eq!(contexts.device(primary(0), 2), Ok(0));
        assert_eq!(contexts.device(primary(2), 2), Err(Error::InvalidContext));
        assert_eq!(contexts.destroy(primary(0)), Err(Error::InvalidContext));
        assert_eq!(contexts.destroy(own), Ok(1));
        assert_eq!(contexts.device(own, 2), Err(Error::InvalidContext));
    }
}
