//! Parses the values of options: sizes, times and ranges. An error says what is expected.

use std::time::Duration;

use memtrace_analysis::Tolerance;
use memtrace_analysis::passes::ReleasePoint;

use regex_lite::Regex;

use crate::http::Address;

/// The maximum size in bytes (exclusive). Sums and differences of two sizes fit in 64 bits with a sign.
const MAX_SIZE: u64 = 1 << 62;
/// The maximum time limit of a command: one day.
const MAX_TIME_LIMIT: Duration = Duration::from_secs(86_400);

/// Parses a size in bytes: a number with a binary unit (KiB) or a decimal unit (kB), or a whole number of bytes.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    const EXPECTED: &str = "expected a size such as 512MiB, 1.5GiB, 20GB or a number of bytes";
    let text = text.trim();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    // The letter alone is binary for some programs (docker, dd) and decimal for others (df --si).
    if let "K" | "k" | "M" | "m" | "G" | "g" | "T" | "t" = unit {
        let unit = unit.to_uppercase();
        return Err(format!("{unit} is ambiguous: use {unit}iB for a binary unit or {unit}B for a decimal unit"));
    }
    let number = number.trim_end();
    let is_fraction_of_byte = number.contains('.') && matches!(unit, "" | "B" | "b");
    // parse-size also accepts exponents, and spaces and underscores between digits.
    let is_decimal = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let size = if is_decimal && !is_fraction_of_byte { parse_size::parse_size(text).ok() } else { None };
    size.filter(|size| *size < MAX_SIZE).ok_or_else(|| EXPECTED.to_owned())
}

/// Parses a regular expression for a line of output.
pub(crate) fn line_expression(text: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|e| format!("no regular expression: {e}"))
}

/// Parses how tokens choose among experts.
pub(crate) fn routing(text: &str) -> Result<String, String> {
    let is_exponent = |exponent: &str| exponent.parse::<f64>().is_ok_and(|number| number.is_finite() && number >= 0.0);
    let is_known = matches!(text, "even" | "one-rank") || text.strip_prefix("zipf:").is_some_and(is_exponent);
    if is_known {
        Ok(text.to_owned())
    } else {
        Err("expected even, one-rank or zipf:EXPONENT, such as zipf:1.2".to_owned())
    }
}

/// Parses a size of at least a byte.
pub(crate) fn limit(text: &str) -> Result<u64, String> {
    size(text)?.checked_sub(1).map(|less| less + 1).ok_or_else(|| "a limit of 0 bytes permits nothing".to_owned())
}

/// Parses the URL of an OpenTelemetry collector. Without a path it is that of OTLP over HTTP, for metrics.
pub(crate) fn otlp_url(text: &str) -> Result<String, String> {
    let Some(rest) = text.strip_prefix("http://") else {
        let is_secure = text.starts_with("https://");
        let reason = if is_secure {
            "https is not supported: run a collector on this host, which forwards it"
        } else {
            "expected a URL such as http://127.0.0.1:4318"
        };
        return Err(reason.to_owned());
    };
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.is_empty() || text.contains(char::is_whitespace) {
        return Err("expected a URL such as http://127.0.0.1:4318".to_owned());
    }
    Ok(if path.is_empty() { format!("http://{authority}/v1/metrics") } else { text.to_owned() })
}

/// Parses the address of a server: an IP address with a port, or the path of a Unix socket.
pub(crate) fn server_address(text: &str) -> Result<Address, String> {
    match text.strip_prefix("unix:") {
        Some("") => None,
        Some(path) => Some(Address::Unix(path.into())),
        None => text.parse().ok().map(Address::Tcp),
    }
    .ok_or_else(|| "expected an address such as 127.0.0.1:9400, or unix:PATH".to_owned())
}

/// The part of a recording that its traces keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    /// The newest events that take this many bytes.
    Bytes(u64),
    /// The events of this time.
    Time(Duration),
}

/// The smallest size and the shortest time that can be kept.
const MIN_KEPT_BYTES: u64 = 1 << 20;
const MIN_KEPT_TIME: Duration = Duration::from_secs(1);

/// Parses what to keep: a size or a time, with a unit.
pub(crate) fn kept(text: &str) -> Result<Kept, String> {
    let has_unit = text.trim_end().ends_with(|c: char| c.is_ascii_alphabetic());
    let is_large = |bytes: &u64| *bytes >= MIN_KEPT_BYTES;
    // A single capital letter is a month for humantime, and a million bytes for others.
    let is_time = || has_unit && !text.bytes().any(|b| b.is_ascii_uppercase());
    let bytes = size(text).ok().filter(|_| has_unit).filter(is_large).map(Kept::Bytes);
    let long = || time(text).filter(|time| *time >= MIN_KEPT_TIME && is_time()).map(Kept::Time);
    bytes.or_else(long).ok_or_else(|| {
        "expected a size of at least 1MiB such as 10GiB, or a time of at least 1s such as 24h or 7d".to_owned()
    })
}

/// The values of a placeholder: `bs=8,16,32`, `dtype=auto,fp8`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Values {
    pub(crate) name: String,
    /// Each once; numbers in ascending order.
    pub(crate) values: Vec<String>,
}

/// The range of a placeholder: `bs=1:512`, `util=0.80:0.99`. The bounds are counted in the last decimal place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    pub(crate) name: String,
    pub(crate) low: u64,
    pub(crate) high: u64,
    /// The number of decimal places.
    decimals: usize,
}

impl Bounds {
    /// The text of a value in the range.
    pub(crate) fn text(&self, value: u64) -> String {
        let unit = 10u64.pow(self.decimals as u32);
        match self.decimals {
            0 => value.to_string(),
            decimals => format!("{}.{:0decimals$}", value / unit, value % unit),
        }
    }
}

/// The maximum number of decimal places of a bound.
const MAX_DECIMALS: usize = 6;
/// The maximum length of a value in bytes. It is part of a file's name.
const MAX_VALUE: usize = 100;

/// The name of a placeholder, and what follows the equals sign.
fn placeholder(text: &str) -> Option<(String, &str)> {
    let (name, rest) = text.split_once('=')?;
    let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    is_name.then(|| (name.to_owned(), rest))
}

/// Parses the values of a placeholder: `NAME=VALUE,VALUE,...`. Each value counts once.
pub(crate) fn values(text: &str) -> Result<Values, String> {
    let is_value = |value: &&str| {
        !value.is_empty() && value.len() <= MAX_VALUE && !value.contains(|c: char| c == '/' || c.is_control())
    };
    let parse = || {
        let (name, rest) = placeholder(text)?;
        let mut values: Vec<&str> = rest.split(',').map(str::trim).collect();
        let numbers: Option<Vec<f64>> = values.iter().map(|value| decimal(value)).collect();
        if numbers.is_some() {
            values.sort_by(|a, b| decimal(a).partial_cmp(&decimal(b)).unwrap_or(std::cmp::Ordering::Equal));
        }
        let mut unique: Vec<String> = Vec::new();
        for value in values {
            let is_same = |other: &String| other == value || decimal(other).is_some_and(|n| Some(n) == decimal(value));
            if !is_value(&value) {
                return None;
            }
            if !unique.iter().any(is_same) {
                unique.push(value.to_owned());
            }
        }
        Some(Values { name, values: unique })
    };
    parse().ok_or_else(|| "expected a name and values, such as bs=8,16,32 or dtype=auto,fp8".to_owned())
}

/// A number of digits with at most one point.
fn decimal(text: &str) -> Option<f64> {
    let is_decimal = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.parse().ok().filter(|_| is_decimal)
}

/// Parses the range of a placeholder: `NAME=LOW:HIGH`.
pub(crate) fn bounds(text: &str) -> Result<Bounds, String> {
    let parse = || {
        let (name, rest) = placeholder(text)?;
        let (low, high) = rest.split_once(':').map(|(low, high)| (low.trim(), high.trim()))?;
        let places = |text: &str| text.split_once('.').map_or(0, |(_, places)| places.len());
        let decimals = places(low).max(places(high));
        let scaled = |text: &str| {
            let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
            let is_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
            if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) || text.ends_with('.') {
                return None;
            }
            format!("{whole}{fraction:0<decimals$}").parse::<u64>().ok()
        };
        if decimals > MAX_DECIMALS {
            return None;
        }
        let (low, high) = (scaled(low)?, scaled(high)?);
        (low <= high).then_some(Bounds { name, low, high, decimals })
    };
    parse().ok_or_else(|| "expected a name and a range of numbers, such as bs=1:512 or util=0.80:0.99".to_owned())
}

/// Parses a whole number of at least 1.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a whole number of at least 1".to_owned())
}

/// Parses the memory of a GPU in bytes: at least 64 MiB, at most 16 TiB.
pub(crate) fn gpu_memory(text: &str) -> Result<u64, String> {
    const RANGE: std::ops::RangeInclusive<u64> = 64 << 20..=16 << 40;
    size(text).and_then(|bytes| RANGE.contains(&bytes).then_some(bytes).ok_or("expected 64MiB to 16TiB".to_owned()))
}

/// Parses a tolerance: a share in percent, or a size.
pub(crate) fn tolerance(text: &str) -> Result<Tolerance, String> {
    match text.strip_suffix('%').map(|share| share.trim().parse::<f64>()) {
        Some(Ok(share)) if (0.0..=1000.0).contains(&share) => Ok(Tolerance::Share(share / 100.0)),
        Some(_) => Err("expected a share such as 2%".to_owned()),
        None => size(text).map(Tolerance::Bytes),
    }
}

/// Parses a limit of a category: `NAME=SIZE`.
pub(crate) fn category_limit(text: &str) -> Result<(String, u64), String> {
    let (name, limit) = text.rsplit_once('=').ok_or("expected NAME=SIZE such as activation=8GiB")?;
    if name.trim().is_empty() {
        return Err("expected a name before the =".to_owned());
    }
    Ok((name.trim().to_owned(), size(limit)?))
}

/// Parses a point at which a program releases memory.
pub(crate) fn release_point(text: &str) -> Result<ReleasePoint, String> {
    ReleasePoint::parse(text)
        .ok_or_else(|| "expected range:NAME, function:NAME or line:FILE:LINE, such as range:sleep".to_owned())
}

/// Parses a time: a number of seconds, or numbers with units such as `250ms` and `1m30s`. The result is exact.
fn time(text: &str) -> Option<Duration> {
    let text = text.trim();
    if text.ends_with(|c: char| c.is_ascii_digit()) && text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return humantime::parse_duration(&format!("{text}s")).ok();
    }
    humantime::parse_duration(text).ok()
}

/// Parses a time limit of a command, above 0 and at most one day.
pub(crate) fn time_limit(text: &str) -> Result<Duration, String> {
    time(text)
        .filter(|limit| *limit > Duration::ZERO && *limit <= MAX_TIME_LIMIT)
        .ok_or_else(|| "expected a time in seconds or with a unit, such as 90, 90s or 1m30s, of at most 24h".to_owned())
}

/// Parses a range of times, in nanoseconds.
pub(crate) fn time_range(text: &str) -> Result<(u64, u64), String> {
    let time_ns = |text: &str| u64::try_from(time(text)?.as_nanos()).ok();
    range(text, u64::MAX, false, time_ns)
        .ok_or_else(|| "expected a time range in seconds or with a unit, such as 1.5-2, 250ms-300ms or 2s-".to_owned())
}

/// Parses a range of steps.
pub(crate) fn step_range(text: &str) -> Result<(u32, u32), String> {
    range(text, u32::MAX, true, |n| n.trim().parse().ok())
        .ok_or_else(|| "expected a step such as 3, or a range of steps such as 2-5 or 2-".to_owned())
}

/// Parses `A-B` or `A-`. Also parses `A` alone, as `A-A`, if `allow_single` is true. `max` is the end of `A-`.
fn range<T: PartialOrd + Copy>(
    text: &str,
    max: T,
    allow_single: bool,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<(T, T)> {
    let (from, to) = match text.split_once('-') {
        Some((from, "")) => (parse(from)?, max),
        Some((from, to)) => (parse(from)?, parse(to)?),
        None if allow_single => (parse(text)?, parse(text)?),
        None => return None,
    };
    (from <= to).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_an_ip_address_or_a_path() {
        assert_eq!(server_address("[::1]:0"), Ok(Address::Tcp("[::1]:0".parse().unwrap())));
        assert_eq!(server_address("unix:a:1"), Ok(Address::Unix("a:1".into())));
        for wrong in ["", "unix:", "localhost:9400", "127.0.0.1", ":9400", "UNIX:/a"] {
            assert!(server_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_kept_has_a_unit() {
        assert_eq!(kept("10GiB"), Ok(Kept::Bytes(10 << 30)));
        assert_eq!(kept("512 MiB"), Ok(Kept::Bytes(512 << 20)));
        assert_eq!(kept("24h"), Ok(Kept::Time(Duration::from_secs(86_400))));
        assert_eq!(kept("90m"), Ok(Kept::Time(Duration::from_secs(5400))));
        assert_eq!(kept("9d"), Ok(Kept::Time(Duration::from_secs(9 * 86_400))));
        for text in ["10", "1000000000", "10G", "10M", "5KiB", "10ms", "0s", "", "h", "-1h"] {
            assert!(kept(text).is_err(), "{text}");
        }
    }

    #[test]
    fn values_are_numbers_in_order_or_words() {
        let values = |text: &str| values(text).map(|values| values.values);
        assert_eq!(values("bs=16,8, 32,8"), Ok(vec!["8".into(), "16".into(), "32".into()]));
        assert_eq!(values("util=0.9,0.85,0.90"), Ok(vec!["0.85".into(), "0.9".into()]));
        assert_eq!(values("dtype=fp8,auto"), Ok(vec!["fp8".into(), "auto".into()]));
        for wrong in ["bs", "=1", "bs=", "bs=1,,2", "b s=1", "path=a/b", "bs=a\u{7}"] {
            assert!(values(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_range_counts_in_its_last_decimal_place() {
        let range = bounds("util=0.8:0.99").unwrap();
        assert_eq!(
            (range.low, range.high, range.text(range.low), range.text(85)),
            (80, 99, "0.80".into(), "0.85".into())
        );
        let range = bounds("bs=1:512").unwrap();
        assert_eq!((range.low, range.high, range.text(7)), (1, 512, "7".into()));
        for wrong in
            ["bs=1", "bs=2:1", "bs=a:b", "bs=1.:2", "bs=.5:1", "bs=-1:2", "bs=0.1234567:1", "bs=1:99999999999999999999"]
        {
            assert!(bounds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_binary_or_decimal_units() {
        assert_eq!((size("20GiB"), size("512MiB"), size("1.5GiB")), (Ok(20 << 30), Ok(512 << 20), Ok(3 << 29)));
        assert_eq!((size("1.5 MiB"), size(" 1TiB "), size("1 KiB")), (Ok(3 << 19), Ok(1 << 40), Ok(1 << 10)));
        assert_eq!((size("20GB"), size("1.5TB"), size("3kB")), (Ok(20_000_000_000), Ok(1_500_000_000_000), Ok(3000)));
        assert_eq!((size("0"), size("512B"), size("4096")), (Ok(0), Ok(512), Ok(4096)));
        assert_eq!((size("20gib"), size("20gb")), (Ok(20 << 30), Ok(20_000_000_000)));
        // A floating-point number has no place for these digits.
        assert_eq!(size("1.00000000000000089TB"), Ok(1_000_000_000_000));
        assert_eq!(size("4611686018427387903"), Ok((1 << 62) - 1));
        for wrong in ["", " ", "-1MiB", "GiB", "B", "1e6", "1e30", "nan", "inf MiB", "1XiB", "99999999999GiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1.5", "1.5B", "1 5MiB", "1_000", "1..5GiB", ".GiB", "4611686018427387904", "+1", "1\u{a0}MiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(size("20G").unwrap_err(), "G is ambiguous: use GiB for a binary unit or GB for a decimal unit");
        assert!(size("much").unwrap_err().starts_with("expected a size"));
    }

    #[test]
    fn a_tolerance_is_a_share_or_a_size() {
        assert_eq!((tolerance("2%"), tolerance("1MiB")), (Ok(Tolerance::Share(0.02)), Ok(Tolerance::Bytes(1 << 20))));
        assert!(tolerance("x%").is_err() && tolerance("-1%").is_err());
    }

    #[test]
    fn a_category_limit_has_a_name_and_a_size() {
        assert_eq!(category_limit("activation=8GiB"), Ok(("activation".to_owned(), 8 << 30)));
        assert_eq!(category_limit("a=b = 1MiB"), Ok(("a=b".to_owned(), 1 << 20)));
        assert!(
            category_limit("activation").is_err() && category_limit("=1MiB").is_err() && category_limit("a=").is_err()
        );
    }

    #[test]
    fn time_limits_have_units_or_are_seconds() {
        assert_eq!((time_limit("90"), time_limit("90s")), (Ok(Duration::from_secs(90)), Ok(Duration::from_secs(90))));
        assert_eq!((time_limit("1m30s"), time_limit("24h")), (Ok(Duration::from_secs(90)), Ok(MAX_TIME_LIMIT)));
        assert_eq!((time_limit("0.25"), time_limit("250 ms")), (Ok(Duration::from_millis(250)), time_limit("0.25s")));
        for wrong in ["", "0", "0s", "-1", "inf", "nan", "1e3", "86401", "25h", "s", "5 parsecs", "1.", "1m30"] {
            assert!(time_limit(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn windows_are_parsed() {
        assert_eq!(step_range("3"), Ok((3, 3)));
        assert_eq!(step_range("2-5"), Ok((2, 5)));
        assert_eq!(step_range("2-"), Ok((2, u32::MAX)));
        assert_eq!(time_range("0.1-2"), Ok((100_000_000, 2_000_000_000)));
        assert_eq!(time_range("1.5s-2.000000001s"), Ok((1_500_000_000, 2_000_000_001)));
        assert_eq!(time_range("250ms-"), Ok((250_000_000, u64::MAX)));
        assert_eq!(time_range("7ns-1us"), Ok((7, 1000)));
        assert_eq!(time_range("1m30s-1h"), Ok((90_000_000_000, 3_600_000_000_000)));
        for wrong in ["", "-", "-3", "5-2", "a-b", "1-2-3", "1.5"] {
            assert!(step_range(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "-", "2", "2-1", "1e3-2e3", ".-1", "99999999999999-", "1x-2x", "1s-2s-3s"] {
            assert!(time_range(wrong).is_err(), "{wrong}");
        }
    }
}
