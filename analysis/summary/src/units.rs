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
        assert_eq!(duration_text(41_200_000_000), "41 s");
        assert_eq!(duration_text(300_000_000), "0.3 s");
        assert_eq!(
            [(0, 0), (0, 9), (1, 1000), (1, 3), (9, 9)].map(|(part, whole)| share_text(part, whole)),
            ["0 %", "0 %", "<1 %", "33 %", "100 %"]
        );
    }
}
