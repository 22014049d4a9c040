//! How much of its cache of keys and values an engine used, by the engine's own counters.

use memtrace_insight::units::{count_text, size_text};
use memtrace_trace::file::CacheUse;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The maximum number of points in time.
const MAX_POINTS: usize = 256;

/// The use of a KV cache over time, by the engine's own counters. Blocks that are only kept for requests with the same
/// prefix are not in use.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvCacheUse {
    /// The highest use, as a share of the cache: 0 to 1.
    pub highest_share: f64,
    /// The same in tokens. Absent if the number of tokens of the cache is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub highest_tokens: Option<u64>,
    /// The time of the highest use, in nanoseconds since 1970.
    pub highest_time_ns: u64,
    /// The requests that used the cache then.
    pub highest_requests: u64,
    /// The bytes of the cache that were never used at the same time as others.
    pub unused_bytes: u64,
    /// The mean over all readings while requests used the cache, as a share of the cache.
    pub mean_share: f64,
    /// The number of these readings. The counters are read several times in each pass of the model.
    pub readings: u64,
    /// The number of readings at which nothing was free.
    pub full_readings: u64,
    /// How often a request was seen to lose its part of the cache to others. It is computed again later.
    pub preemptions: u64,
    /// The use over time: at most 256 points, each the highest of its time.
    pub over_time: Vec<KvCachePoint>,
    /// The figures in one line.
    pub text: String,
}

/// The use of a KV cache at one point in time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct KvCachePoint {
    /// The time, in nanoseconds since 1970.
    pub time_ns: u64,
    /// The used share of the cache: 0 to 1.
    pub share: f64,
    /// The requests that used it.
    pub requests: u64,
}

impl KvCacheUse {
    /// The use of a cache with so many bytes and tokens. `None` if the engine's counters were not read.
    pub(crate) fn new(
        uses: &[CacheUse],
        bytes: u64,
        tokens: Option<u64>,
        epoch_ns: impl Fn(u64) -> u64,
    ) -> Option<KvCacheUse> {
        let share = |one: &CacheUse| (one.used as f64 / one.size.max(1) as f64).min(1.0);
        let sum = |of: fn(&CacheUse) -> u64| uses.iter().map(of).fold(0, u64::saturating_add);
        let readings = sum(|one| one.readings);
        // The first of equal ones.
        let highest = uses.iter().rev().max_by(|a, b| share(a).total_cmp(&share(b))).filter(|_| readings > 0)?;
        let weighted = uses.iter().map(|one| one.sum as f64 / one.size.max(1) as f64).sum::<f64>();
        let over_time = uses.chunks(uses.len().div_ceil(MAX_POINTS)).filter_map(|chunk| {
            let one = chunk.iter().rev().max_by(|a, b| share(a).total_cmp(&share(b)))?;
            Some(KvCachePoint { time_ns: epoch_ns(one.ticks), share: share(one), requests: one.requests })
        });
        let mut all = KvCacheUse {
            highest_share: share(highest),
            highest_tokens: tokens.map(|tokens| (share(highest) * tokens as f64).round() as u64),
            highest_time_ns: epoch_ns(highest.ticks),
            highest_requests: highest.requests,
            unused_bytes: bytes - (share(highest) * bytes as f64) as u64,
            mean_share: weighted / readings as f64,
            readings,
            full_readings: sum(|one| one.full),
            preemptions: sum(|one| one.preempted),
            over_time: over_time.collect(),
            text: String::new(),
        };
        all.text = all.composed_text();
        Some(all)
    }

    fn composed_text(&self) -> String {
        let requests = match self.highest_requests {
            1 => "1 request".to_owned(),
            count => format!("{} requests", count_text(count)),
        };
        let tokens = self.highest_tokens.map(|tokens| format!("{} tokens, ", count_text(tokens)));
        let mut text = format!(
            "at most {}{} with {requests}; {} on average while requests ran",
            tokens.unwrap_or_default(),
            percent(self.highest_share),
            percent(self.mean_share),
        );
        if self.preemptions > 0 {
            let times = if self.preemptions == 1 { "once" } else { "times" };
            let count =
                if self.preemptions == 1 { String::new() } else { format!("{} ", count_text(self.preemptions)) };
            text += &format!(
                "; it was full: requests lost their part of it {count}{times} (preempted), and were computed again"
            );
        } else if self.full_readings > 0 {
            text += "; it was full, and no request was seen to be preempted";
        } else {
            text += &format!("; {} of it were never needed in this run", size_text(self.unused_bytes));
        }
        text
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache_use(ticks: u64, used: u64, readings: u64) -> CacheUse {
        CacheUse {
            ticks,
            used,
            size: 1000,
            requests: 4,
            readings,
            sum: used * readings,
            full: 0,
            preempted: 0,
            ended: 0,
        }
    }

    #[test]
    fn the_highest_use_and_the_mean_are_shares_of_the_cache() {
        let mut uses: Vec<CacheUse> = (0..1000).map(|n| cache_use(n, if n == 700 { 32 } else { 10 }, 2)).collect();
        let of = |uses: &[CacheUse]| KvCacheUse::new(uses, 1 << 30, Some(16_000), |ticks| ticks).unwrap();
        let found = of(&uses);
        assert_eq!((found.highest_tokens, found.highest_time_ns, found.readings), (Some(512), 700, 2000));
        assert!((found.mean_share - 0.010_022).abs() < 1e-9, "{found:?}");
        assert_eq!((found.over_time.len(), found.over_time[175].share), (250, 0.032));
        assert_eq!(
            found.text,
            "at most 512 tokens, 3.2 % with 4 requests; 1.0 % on average while requests ran; 991 MiB of it were never \
             needed in this run"
        );
        uses[5] = CacheUse { full: 1, preempted: 3, ..cache_use(5, 1000, 1) };
        assert!(
            of(&uses).text.ends_with("requests lost their part of it 3 times (preempted), and were computed again")
        );
        assert_eq!(KvCacheUse::new(&[], 1, None, |ticks| ticks), None);
    }
}
