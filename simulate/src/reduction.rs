//! Reductions over the data of all ranks, with NCCL's numbers for types and operations. Only integers are reduced,
//! because kernels do not compute other numbers.

/// `ncclInt8` to `ncclUint64`: an even number is a signed type.
const INTEGERS: std::ops::RangeInclusive<i32> = 0..=5;

/// Whether an `ncclDataType_t` is a type of integers.
pub fn is_integer(kind: i32) -> bool {
    INTEGERS.contains(&kind)
}

/// The size of an `ncclDataType_t` in bytes.
pub fn element_bytes(kind: i32) -> usize {
    match kind {
        4 | 5 | 8 => 8,
        2 | 3 | 7 => 4,
        6 | 9 => 2,
        _ => 1,
    }
}

/// The integers of a buffer.
fn integers(bytes: &[u8], kind: i32) -> Vec<i128> {
    let element = |bytes: &[u8]| {
        let bits = bytes.iter().rfold(0, |bits: u64, byte| bits << 8 | u64::from(*byte));
        match kind {
            0 => i128::from(bits as i8),
            2 => i128::from(bits as i32),
            4 => i128::from(bits as i64),
            _ => i128::from(bits),
        }
    };
    bytes.chunks_exact(element_bytes(kind)).map(element).collect()
}

/// The result of an `ncclRedOp_t` over the parts of all ranks. `None` for other types than integers, and for operations
/// that the program defined.
pub fn reduce(parts: &[Vec<u8>], kind: i32, operation: i32) -> Option<Vec<u8>> {
    let combine: fn(i128, i128) -> i128 = match operation {
        0 | 4 => i128::wrapping_add,
        1 => i128::wrapping_mul,
        2 => i128::max,
        3 => i128::min,
        _ => return None,
    };
    let mut columns = parts.iter().filter(|_| is_integer(kind)).map(|part| integers(part, kind));
    let first = columns.next()?;
    let result = columns.fold(first, |result, part| result.into_iter().zip(part).map(|(a, b)| combine(a, b)).collect());
    let divisor = if operation == 4 { parts.len() as i128 } else { 1 };
    let size = element_bytes(kind);
    Some(result.into_iter().flat_map(|value| (value / divisor).to_le_bytes().into_iter().take(size)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_i32(values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn integers_are_reduced_by_each_operation() {
        let parts = [of_i32(&[-3, 7]), of_i32(&[5, 2]), of_i32(&[4, 0])];
        let results = [0, 1, 2, 3, 4].map(|operation| reduce(&parts, 2, operation).unwrap());
        assert_eq!(results, [[6, 9], [-60, 0], [5, 7], [-3, 0], [2, 3]].map(|values| of_i32(&values)));
    }

    #[test]
    fn sums_wrap_in_the_width_of_the_type() {
        assert_eq!(reduce(&[vec![200], vec![100]], 1, 0), Some(vec![44]));
        assert_eq!(reduce(&[vec![0x80], vec![0xff]], 0, 3), Some(vec![0x80]), "-128 is the smaller one");
        let large = u64::MAX.to_le_bytes().to_vec();
        assert_eq!(reduce(&[large.clone(), large], 5, 2), Some(vec![0xff; 8]));
    }

    #[test]
    fn other_numbers_are_not_reduced() {
        assert_eq!(reduce(&[vec![0; 4]], 7, 0), None);
        assert_eq!(reduce(&[vec![0; 4]], 2, 5), None, "an operation of the program");
    }
}
