//! Formats numbers for people: binary units, three significant digits.

/// The units of sizes, each 1024 times the one before.
pub const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/// Formats bytes: `18.6 GiB`, `512 B`, `0`.
pub fn size_text(bytes: u64) -> String {
    if bytes == 0 {
        return "0".to_owned();
    }
    let mut value = bytes as f64;
    let mut unit = 0;
    // 1023.5 would be printed as 1024.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{} {}", digits(value), UNITS[unit]) }
}

/// Formats signed bytes: `+18.6 GiB`, `-3.00 MiB`, `0`.
pub fn signed_size_text(bytes: i64) -> String {
    match bytes {
        0 => "0".to_owned(),
        1.. => format!("+{}", size_text(bytes.unsigned_abs())),
        _ => format!("-{}", size_text(bytes.unsigned_abs())),
    }
}

fn digits(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Formats a count: `1,234,567`.
pub fn count_text(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things: `1 block`, `24 blocks`.
pub fn number_text(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", count_text(count), if count == 1 { "" } else { "s" })
}

/// Formats nanoseconds: `41 s`, `3 min 20 s`, `2 h 5 min`, `0.3 s`.
pub fn duration_text(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    match seconds {
        0..=9 => format!("{:.1} s", ns as f64 / 1e9),
        10..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Formats an estimated count with two significant digits: `130,000`.
pub fn estimate_text(count: u64) -> String {
    let mut unit = 1;
    while count / unit >= 100 {
        unit *= 10;
    }
    count_text(count / unit * unit)
}

/// Formats an estimated duration in nanoseconds with two significant digits: `43 min`, `12 hours`, `25 days`.
pub fn estimated_duration_text(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let (count, unit) = match seconds {
        0..=119 => (seconds, "s"),
        120..=7199 => (seconds / 60, "min"),
        7200..=259_199 => (seconds / 3600, "hours"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{} {unit}", estimate_text(count))
}

/// Formats a share as a whole percentage: `3 %`, `<1 %`. 0 if `whole` is 0.
pub fn share_text(part: u64, whole: u64) -> String {
    let percent = if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
    if percent > 0.0 && percent < 0.5 { "<1 %".to_owned() } else { format!("{percent:.0} %") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        assert_eq!(size_text(0), "0");
        assert_eq!(size_text(512), "512 B");
        assert_eq!(size_text(1023), "1.00 KiB");
        assert_eq!(size_text(489_624_576), "467 MiB");
        assert_eq!(size_text(20 << 20), "20.0 MiB");
        assert_eq!(size_text(1 << 50), "1.00 PiB");
        assert_eq!(signed_size_text(-(3 << 30)), "-3.00 GiB");
        assert_eq!(count_text(1_234_567), "1,234,567");
        assert_eq!(count_text(12), "12");
        assert_eq!((number_text(1, "block"), number_text(24, "block")), ("1 block".into(), "24 blocks".into()));
        assert_eq!(duration_text(41_200_000_000), "41 s");
        assert_eq!(duration_text(300_000_000), "0.3 s");
        assert_eq!([7, 99, 129, 125_999].map(estimate_text), ["7", "99", "120", "120,000"]);
        let seconds = [40, 2580, 45_000, 86_400 * 1234].map(|seconds| estimated_duration_text(seconds * 1_000_000_000));
        assert_eq!(seconds, ["40 s", "43 min", "12 hours", "1,200 days"]);
        assert_eq!(
            [(0, 0), (0, 9), (1, 1000), (1, 3), (9, 9)].map(|(part, whole)| share_text(part, whole)),
            ["0 %", "0 %", "<1 %", "33 %", "100 %"]
        );
    }
}
