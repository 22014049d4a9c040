//! The workspaces that cuFFT 12.0 requests for plans, as rules that 2,095 measured plans show
//! (`measurements/fourier.jsonl.gz`).
//!
//! The rules are about the length `n` of each dimension, with `m` transforms of it:
//!
//! - Complex, of a length that one kernel transforms: nothing. Otherwise a copy of the data.
//! - Complex, of a length with a prime factor above 127, beyond a limit: Bluestein's algorithm, a convolution of at
//!   least `2 n - 1` elements, which takes two buffers of it for each transform.
//! - Real, of even length: as a complex one of half the length, and the packed data, unless one kernel does all.
//! - Real, of odd length: two transforms of the batch are one complex transform, which takes two copies of its data, or
//!   one and Bluestein's buffers.
//! - Of several dimensions: the largest of all.
//!
//! Which lengths one kernel transforms is a table inside cuFFT. The limits here are those that the measured plans show.

/// The type of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 16 bits for each part of a number.
    Half,
    /// 32 bits.
    Single,
    /// 64 bits.
    Double,
}

impl Precision {
    /// The size of a complex number in bytes.
    fn complex_bytes(self) -> u64 {
        match self {
            Precision::Half => 4,
            Precision::Single => 8,
            Precision::Double => 16,
        }
    }

    /// One of two limits.
    fn limit(self, single: u64, double: u64) -> u64 {
        if self == Precision::Double { double } else { single }
    }
}

/// A plan.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Whether the input or the output is real.
    pub is_real: bool,
    /// The type of the elements.
    pub precision: Precision,
    /// The length of each dimension. The last one is contiguous.
    pub lengths: &'a [u64],
    /// The number of transforms.
    pub batch: u64,
}

/// How a complex transform of one length is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    /// Without a workspace.
    InPlace,
    /// Through a copy of the data.
    Copy,
    /// Through a longer convolution.
    Bluestein,
}

/// Sizes of buffers are multiples of this, in bytes.
const ALIGNMENT: u64 = 1024;
/// The largest prime factor of the lengths that kernels are generated for.
const LARGEST_FACTOR: u64 = 127;

/// The largest prime factor of a number. 1 for 1.
fn largest_factor(mut n: u64) -> u64 {
    let (mut largest, mut factor) = (1, 2);
    while factor * factor <= n {
        while n.is_multiple_of(factor) {
            (largest, n) = (factor, n / factor);
        }
        factor += 1;
    }
    largest.max(n)
}

/// How a complex transform is done. `is_strided` if its elements are not contiguous, as those of all dimensions but the
/// last.
fn algorithm(n: u64, precision: Precision, is_strided: bool) -> Algorithm {
    let factor = largest_factor(n);
    let is_prime = factor == n;
    let in_place = match factor {
        0..=2 => n <= 16384,
        3..=7 if is_strided => n <= precision.limit(3900, 1300),
        // 22,050 is the one exception below the limit.
        3..=7 => n <= precision.limit(24576, 4400) && n != 22050,
        _ if is_prime && factor <= LARGEST_FACTOR => true,
        11 | 13 => n <= if is_strided { 1000 } else { 6000 },
        17..=29 => n <= 256,
        30..=LARGEST_FACTOR => false,
        _ if n > precision.limit(4096, 2048) => return Algorithm::Bluestein,
        _ => is_prime || n >= 512 || precision == Precision::Half,
    };
    if in_place { Algorithm::InPlace } else { Algorithm::Copy }
}

/// The bytes of the two buffers of Bluestein's algorithm.
fn bluestein_bytes(n: u64, precision: Precision) -> u64 {
    // The length of the convolution has small factors. The measured ones are 1.2 % above twice the length in the
    // middle.
    let convolution = if n <= 4096 { 8192 } else { (2024 * n / 1000).next_multiple_of(128) };
    2 * precision.complex_bytes() * convolution
}

/// The workspace of `count` complex transforms in bytes.
fn complex(n: u64, count: u64, precision: Precision, is_strided: bool) -> u64 {
    match algorithm(n, precision, is_strided) {
        Algorithm::InPlace => 0,
        Algorithm::Copy => precision.complex_bytes() * n * count,
        Algorithm::Bluestein => bluestein_bytes(n, precision) * count,
    }
}

/// Whether one kernel does real transforms of an even length.
fn is_one_kernel(n: u64) -> bool {
    /// Lengths below the limits that take a workspace.
    const EXCEPTIONS: [u64; 7] = [98, 154, 196, 242, 500, 700, 882];
    match largest_factor(n) {
        0..=2 => n <= 16384,
        3..=11 => n <= 1024 && !EXCEPTIONS.contains(&n) || [1080, 1920].contains(&n),
        12..=19 => n <= 140,
        _ => false,
    }
}

/// The workspace of the real transforms of the last dimension in bytes. `rest` is the number of transforms for each of
/// the batch.
fn real(n: u64, batch: u64, rest: u64, precision: Precision) -> u64 {
    let element = precision.complex_bytes();
    if n.is_multiple_of(2) {
        if is_one_kernel(n) {
            return 0;
        }
        let (half, count) = (n / 2, batch * rest);
        let data = element * half * count;
        return match algorithm(half, precision, false) {
            Algorithm::Bluestein => data + bluestein_bytes(half, precision) * count,
            _ if largest_factor(half) > LARGEST_FACTOR && half > precision.limit(2500, 1400) => {
                data + data.next_multiple_of(ALIGNMENT)
            }
            _ => data,
        };
    }
    if n < 64 || n <= 1000 && largest_factor(n) <= 11 {
        return 0;
    }
    let pairs = rest * batch.div_ceil(2);
    let data = element * n * pairs;
    match algorithm(n, precision, false) {
        Algorithm::Bluestein => data + bluestein_bytes(n, precision) * pairs,
        _ => data + data.next_multiple_of(ALIGNMENT),
    }
}

impl Plan<'_> {
    /// The workspace that the plan requests, in bytes.
    pub fn workspace(&self) -> u64 {
        let Some((&last, others)) = self.lengths.split_last() else { return 0 };
        let rest: u64 = others.iter().product();
        let (width, of_last) = if self.is_real {
            (last / 2 + 1, real(last, self.batch, rest, self.precision))
        } else {
            (last, complex(last, self.batch * rest, self.precision, false))
        };
        let of_others = others.iter().map(|&n| complex(n, self.batch * rest / n.max(1) * width, self.precision, true));
        of_others.fold(of_last, u64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;
    use serde_json::Value;
    use std::io::{BufRead, BufReader};

    /// The measured plans: the workspace, and that of the rules, each with the bytes of the data.
    fn measured(name: &str) -> Vec<(String, u64, u64, u64)> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("measurements");
        let file = std::fs::File::open(folder.join(name)).unwrap();
        let rows = BufReader::new(GzDecoder::new(file)).lines().skip(1).map(|line| {
            let row: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let lengths: Vec<u64> = row[2].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
            let precision = match row[1].as_str().unwrap() {
                "half" => Precision::Half,
                "float" => Precision::Single,
                _ => Precision::Double,
            };
            let (is_real, batch) = (row[0] != "c2c", row[3].as_u64().unwrap());
            let plan = Plan { is_real, precision, lengths: &lengths, batch };
            let data = precision.complex_bytes() * lengths.iter().product::<u64>() * batch / (1 + u64::from(is_real));
            // A negative figure is an error: not all lengths exist for all types.
            row[5].as_u64().map(|bytes| (row.to_string(), bytes, plan.workspace(), data))
        });
        rows.flatten().collect()
    }

    /// How many plans of a file were measured, and those for which the rules are more than 3 % of all data off.
    fn wrong(name: &str) -> (usize, Vec<String>) {
        let plans = measured(name);
        let is_wrong = |bytes: u64, rule: u64, data: u64| bytes.abs_diff(rule) * 100 > 3 * (data + bytes);
        let all = plans.len();
        let wrong = plans.into_iter().filter(|(_, bytes, rule, data)| is_wrong(*bytes, *rule, *data));
        (all, wrong.map(|(plan, ..)| plan).collect())
    }

    #[test]
    fn the_rules_agree_with_the_measured_plans() {
        let (all, wrong) = wrong("fourier.jsonl.gz");
        assert!(all > 1900 && wrong.len() * 50 <= all, "{} of {all}: {wrong:#?}", wrong.len());
    }

    #[test]
    fn the_rules_agree_with_plans_that_they_were_not_made_from() {
        let (all, wrong) = wrong("fourier-check.jsonl.gz");
        assert!(all > 400 && wrong.len() * 10 <= all, "{} of {all}: {wrong:#?}", wrong.len());
    }

    #[test]
    fn transforms_of_images_and_sound() {
        let plan = |is_real, lengths: &[u64], batch| {
            Plan { is_real, precision: Precision::Single, lengths, batch }.workspace()
        };
        assert_eq!(plan(true, &[224, 224], 16), 0);
        assert_eq!(plan(true, &[400], 3000), 0, "the window of Whisper");
        assert_eq!(plan(true, &[30_000], 32), 32 * 120_000);
        assert_eq!(plan(false, &[1 << 20], 1), 8 << 20);
        assert_eq!(plan(true, &[1103], 8), 71_136);
        assert_eq!(plan(true, &[], 1), 0);
    }
}
