//! Conditions on the memory of a device, such as `allocated > 60GiB`.

use memtrace_analysis::report::LiveDevice;

use crate::option_values::size;

/// A figure of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Figure {
    Allocated,
    Reserved,
    Used,
}

/// The limit that a [`Figure`] is compared with.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Limit {
    Bytes(u64),
    /// A share of the device's memory, from 0 to 1.
    Share(f64),
}

/// A condition on a device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Condition {
    figure: Figure,
    limit: Limit,
}

impl Condition {
    /// Whether the device exceeds the limit. A figure that is unknown exceeds nothing.
    pub(crate) fn holds(&self, device: &LiveDevice) -> bool {
        let bytes = match self.figure {
            Figure::Allocated => Some(device.totals.allocated_bytes),
            Figure::Reserved => Some(device.totals.reserved_bytes),
            Figure::Used => device.used_bytes,
        };
        let limit = match self.limit {
            Limit::Bytes(limit) => Some(limit as f64),
            Limit::Share(share) => device.total_bytes.map(|total| total as f64 * share),
        };
        bytes.zip(limit).is_some_and(|(bytes, limit)| bytes as f64 > limit)
    }
}

/// Parses `FIGURE > SIZE` or `FIGURE > SHARE%`. FIGURE is `allocated`, `reserved` or `used`.
pub(crate) fn condition(text: &str) -> Result<Condition, String> {
    const EXPECTED: &str = "expected allocated, reserved or used, then > and a size or a share of the device's memory, \
        such as 'allocated > 60GiB' or 'used > 90%'";
    let (figure, limit) = text.split_once('>').ok_or(EXPECTED)?;
    let figure = match figure.trim() {
        "allocated" => Figure::Allocated,
        "reserved" => Figure::Reserved,
        "used" => Figure::Used,
        _ => return Err(EXPECTED.to_owned()),
    };
    let limit = limit.trim();
    let limit = match limit.strip_suffix('%') {
        Some(share) => {
            let percent: Option<f64> = share.trim().parse().ok().filter(|share| (0.0..=100.0).contains(share));
            Limit::Share(percent.ok_or(EXPECTED)? / 100.0)
        }
        None => Limit::Bytes(size(limit)?),
    };
    Ok(Condition { figure, limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_analysis::report::Totals;

    #[test]
    fn a_condition_compares_a_figure_with_bytes_or_a_share() {
        let device = LiveDevice {
            total_bytes: Some(1000),
            totals: Totals { allocated_bytes: 600, reserved_bytes: 800, ..Totals::default() },
            ..LiveDevice::default()
        };
        let holds = |text: &str| condition(text).unwrap().holds(&device);
        assert!(holds("allocated > 599") && !holds("allocated>600") && holds(" reserved > 79.5 % "));
        assert!(holds("allocated > 50%") && !holds("allocated > 60%") && !holds("allocated > 1GiB"));
        assert!(!holds("used > 0"), "it is unknown");
        let unknown = LiveDevice { total_bytes: None, ..device.clone() };
        assert!(!condition("allocated > 1%").unwrap().holds(&unknown));
        for bad in ["", "allocated", "allocated < 5", "peak > 5", "allocated > ", "allocated > 5G", "allocated > 101%"]
        {
            assert!(condition(bad).is_err(), "{bad}");
        }
    }
}
