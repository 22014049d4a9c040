//! A map of address ranges that never overlap. A range is found by any address inside it.

use std::collections::BTreeMap;

/// A map from `[base, base + size)` to a value. It contains no empty ranges.
#[derive(Debug)]
pub struct RangeMap<T> {
    by_base: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for RangeMap<T> {
    fn default() -> Self {
        RangeMap { by_base: BTreeMap::new() }
    }
}

/// One range of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a, T> {
    /// The first address.
    pub base: u64,
    /// The size in bytes.
    pub size: u64,
    /// The value of the range.
    pub value: &'a T,
}

impl<T> RangeMap<T> {
    /// Adds a range. Returns the value as an error when the range is empty, wraps around or overlaps another.
    pub fn insert(&mut self, base: u64, size: u64, value: T) -> Result<(), T> {
        let Some(end) = base.checked_add(size).filter(|_| size > 0) else { return Err(value) };
        if self.overlapping(base, end).next().is_some() {
            return Err(value);
        }
        self.by_base.insert(base, (size, value));
        Ok(())
    }

    /// The range that contains `address`.
    pub fn find(&self, address: u64) -> Option<Found<'_, T>> {
        let (&base, (size, value)) = self.by_base.range(..=address).next_back()?;
        (address - base < *size).then_some(Found { base, size: *size, value })
    }

    /// The range that begins at `base`.
    pub fn get(&self, base: u64) -> Option<Found<'_, T>> {
        self.by_base.get(&base).map(|(size, value)| Found { base, size: *size, value })
    }

    /// Removes the range that begins at `base`. Returns its size and value.
    pub fn remove(&mut self, base: u64) -> Option<(u64, T)> {
        self.by_base.remove(&base)
    }

    /// The ranges that overlap `[start, end)`, in order.
    pub fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = Found<'_, T>> {
        let first = self.find(start).map_or(start, |found| found.base);
        self.by_base.range(first..end.max(first)).map(|(&base, (size, value))| Found { base, size: *size, value })
    }

    /// The number of ranges.
    pub fn len(&self) -> usize {
        self.by_base.len()
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.by_base.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A naive model: a list that is searched from start to end.
    #[derive(Default)]
    struct Naive(Vec<(u64, u64, u32)>);

    impl Naive {
        fn insert(&mut self, base: u64, size: u64, value: u32) -> bool {
            let fits = size > 0 && self.0.iter().all(|&(b, s, _)| base + size <= b || b + s <= base);
            if fits {
                self.0.push((base, size, value));
            }
            fits
        }
        fn find(&self, address: u64) -> Option<(u64, u64, u32)> {
            self.0.iter().copied().find(|&(b, s, _)| b <= address && address < b + s)
        }
        fn remove(&mut self, base: u64) -> Option<(u64, u32)> {
            let at = self.0.iter().position(|&(b, _, _)| b == base)?;
            let (_, size, value) = self.0.remove(at);
            Some((size, value))
        }
        fn overlapping(&self, start: u64, end: u64) -> Vec<u64> {
            let mut v: Vec<_> = self.0.iter().filter(|&&(b, s, _)| b < end && start < b + s).map(|r| r.0).collect();
            v.sort();
            v
        }
    }

    proptest! {
        #[test]
        fn the_map_agrees_with_a_naive_model(steps in prop::collection::vec((0..4u8, 0..64u64, 0..12u64), 1..200)) {
            let (mut map, mut naive) = (RangeMap::default(), Naive::default());
            for (i, (what, a, n)) in steps.into_iter().enumerate() {
                match what {
                    0 => prop_assert_eq!(map.insert(a, n, i as u32).is_ok(), naive.insert(a, n, i as u32)),
                    1 => prop_assert_eq!(map.remove(a), naive.remove(a)),
                    2 => prop_assert_eq!(map.find(a).map(|f| (f.base, f.size, *f.value)), naive.find(a)),
                    _ if n > 0 => {
                        let found: Vec<_> = map.overlapping(a, a + n).map(|f| f.base).collect();
                        prop_assert_eq!(found, naive.overlapping(a, a + n));
                    }
                    _ => {}
                }
                prop_assert_eq!(map.len(), naive.0.len());
            }
        }
    }

    #[test]
    fn a_range_at_the_end_of_the_address_space_does_not_wrap() {
        let mut map = RangeMap::default();
        assert!(map.insert(u64::MAX - 4, 8, ()).is_err());
        assert!(map.insert(u64::MAX - 4, 4, ()).is_ok());
        assert!(map.find(u64::MAX - 1).is_some());
        assert!(map.find(u64::MAX).is_none());
    }
}
