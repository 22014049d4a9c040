//! Which Python objects hold the tensors (`--holders`): for issues, and for the largest live tensors.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use memtrace_input::Process;
use memtrace_insight::diagnostics::{Issue, KeptBy};
use memtrace_replay::{HeldBlock, HolderChange};
use memtrace_trace::definition::{GRAPH_HOLDER, ScanOccasion};
use memtrace_trace::file::HolderScan;
use memtrace_trace::ids::{ContextId, StackId};

use crate::summary::{HolderSummary, HoldersSummary, ScanSummary};

/// At most this many scans of a recording count, the last ones, and this many blocks at once. A recorder writes fewer.
const MAX_SCANS: usize = 1 << 8;
const MAX_LIVE: usize = 1 << 16;
/// The maximum number of holders listed for one issue.
const HOLDERS_OF_ISSUE: usize = 3;
/// The dictionaries of an `nn.Module` with its parts.
const MODULE_TABLES: [&str; 3] = ["._modules", "._parameters", "._buffers"];
/// Up to this many different names in paths that are otherwise the same get a line each.
const NAMED_KEYS: usize = 4;
/// Paths that hold less than this share of an issue's memory are not listed: they are the variables of the present
/// step.
const MIN_SHARE: u64 = 20;
/// The maximum number of holders listed for what stayed after memory was released.
const HOLDERS_AFTER_RELEASE: usize = 8;
/// The maximum number of holders listed for one device.
const HOLDERS_OF_DEVICE: usize = 32;

/// The blocks that one path holds, by the address of their memory.
#[derive(Clone)]
struct Held {
    path: Rc<str>,
    shape: Rc<str>,
    block: HeldBlock,
}

type Site = (i16, StackId, ContextId);

/// The holders at one scan.
struct Scan {
    facts: HolderScan,
    /// Sorted by `seq` of the allocations.
    held: Vec<Held>,
}

impl Scan {
    fn bytes(&self, device: i16) -> u64 {
        self.held.iter().filter(|held| held.block.device == device).map(|held| held.block.size).sum()
    }

    fn summary(&self) -> ScanSummary {
        ScanSummary {
            occasion: match self.facts.occasion {
                ScanOccasion::Running => "running",
                ScanOccasion::OutOfMemory => "out_of_memory",
                ScanOccasion::End => "end",
            }
            .to_owned(),
            event: self.facts.seq,
            objects: self.facts.objects,
            is_partial: self.facts.is_partial,
        }
    }
}

/// The memory that a process's objects held, at the scans that matter.
pub(crate) struct Holders {
    /// Whether `--holders` would have given a result that this recording lacks.
    is_missing: bool,
    /// The scan with the most bytes of each allocation site, the latest of equal ones. Only what the site allocated.
    by_site: HashMap<Site, Scan>,
    /// By device: the scan with the most held bytes, and the last one with at least half as many bytes as that.
    by_device: BTreeMap<i16, Scan>,
    /// By device and event: what was held at the first scan after that event. Only what was allocated before it.
    after: BTreeMap<(i16, u64), Vec<Held>>,
}

impl Holders {
    /// Collects the changes of a process's holders. `ooms` gives the number of events at the explained out-of-memory
    /// error of each device. `after` is for [`Self::after`].
    pub(crate) fn of(
        process: &Process,
        changes: &[HolderChange],
        ooms: &BTreeMap<i16, u64>,
        after: &BTreeSet<(i16, u64)>,
    ) -> Holders {
        let definitions = process.definitions();
        let is_trace = process.path().extension().is_some_and(|extension| extension == "mtr");
        let has_python = || definitions.frames.iter().any(|frame| !frame.native && !frame.name.is_empty());
        let mut holders = Holders {
            is_missing: is_trace && definitions.holder_scans.is_empty() && has_python(),
            by_site: HashMap::new(),
            by_device: BTreeMap::new(),
            after: BTreeMap::new(),
        };
        let mut scans = definitions.holder_scans.clone();
        scans.sort_by_key(|scan| scan.seq);
        scans.drain(..scans.len().saturating_sub(MAX_SCANS));
        let mut changes = changes.iter().peekable();
        let mut live: BTreeMap<u64, Held> = BTreeMap::new();
        for facts in scans {
            while let Some(change) = changes.next_if(|change| change.scan <= facts.seq) {
                match change.block.filter(|_| !change.path.is_empty()) {
                    Some(block) if live.len() < MAX_LIVE || live.contains_key(&change.address) => {
                        live.insert(
                            change.address,
                            Held { path: (*change.path).into(), shape: (*change.shape).into(), block },
                        );
                    }
                    _ => _ = live.remove(&change.address),
                }
            }
            holders.add_scan(facts, &live, ooms);
            for &(device, seq) in after.iter().filter(|(_, seq)| *seq <= facts.seq) {
                let is_meant = |held: &&Held| held.block.device == device && held.block.seq <= seq;
                let held = || live.values().filter(is_meant).cloned().collect();
                holders.after.entry((device, seq)).or_insert_with(held);
            }
        }
        holders
    }

    fn add_scan(&mut self, facts: HolderScan, live: &BTreeMap<u64, Held>, ooms: &BTreeMap<i16, u64>) {
        let mut by_site: BTreeMap<Site, Vec<Held>> = BTreeMap::new();
        let mut by_device: BTreeMap<i16, Vec<Held>> = BTreeMap::new();
        for held in live.values() {
            let block = &held.block;
            by_site.entry((block.device, block.stack, block.context)).or_default().push(held.clone());
            by_device.entry(block.device).or_default().push(held.clone());
        }
        for (site, held) in by_site {
            let scan = Scan::new(facts, held);
            let known = self.by_site.get(&site).map_or(0, |known| known.bytes(site.0));
            if scan.bytes(site.0) >= known {
                self.by_site.insert(site, scan);
            }
        }
        for (device, held) in by_device {
            let scan = Scan::new(facts, held);
            let known = self.by_device.get(&device);
            let after_oom = |seq: u64| ooms.get(&device).is_some_and(|oom| seq >= *oom);
            // The state at the explained error is what the user needs. Without an error it is the last large one.
            let is_better = known.is_none_or(|known| {
                let share = if facts.occasion == ScanOccasion::End { 2 } else { 1 };
                let is_large = scan.bytes(device).saturating_mul(share) >= known.bytes(device);
                match (after_oom(known.facts.seq), after_oom(facts.seq)) {
                    (false, true) => true,
                    (true, true) => scan.bytes(device) > known.bytes(device),
                    _ => is_large,
                }
            });
            if is_better {
                self.by_device.insert(device, scan);
            }
        }
    }

    /// The holders of the blocks of an issue. Empty if it is unknown.
    pub(crate) fn of_issue(&self, issue: &Issue) -> Vec<HolderSummary> {
        if issue.rule.kept_by == KeptBy::Nothing {
            return Vec::new();
        }
        let of_device = || self.by_site.iter().filter(|(site, _)| site.0 == issue.device);
        let of_graphs = of_device().flat_map(|(_, scan)| &scan.held).filter(|held| held.path.ends_with(GRAPH_HOLDER));
        let is_of_graph = issue.rule.kept_by == KeptBy::Graphs;
        let mut held: Vec<&Held> = if is_of_graph { of_graphs.collect() } else { Vec::new() };
        if held.is_empty() {
            let place = issue.place.filter(|_| issue.sites.is_empty());
            let sites: Vec<(StackId, ContextId)> = issue.sites.iter().copied().chain(place).collect();
            // A source without a stack is an autograd node.
            let is_meant = |(site, _): &(&Site, &Scan)| {
                let is_site = |(stack, context): &(StackId, ContextId)| {
                    if stack.is_none() { *context == site.2 } else { *stack == site.1 }
                };
                sites.iter().any(is_site)
            };
            held.extend(of_device().filter(is_meant).flat_map(|(_, scan)| &scan.held));
        }
        let bytes: u64 = held.iter().map(|held| held.block.size).sum();
        let mut holders = grouped(&held, HOLDERS_OF_ISSUE).0;
        holders.retain(|holder| holder.bytes.saturating_mul(MIN_SHARE) >= bytes);
        holders
    }

    /// The line that names the option, for an issue that it would explain.
    pub(crate) fn help(&self, issue: &Issue) -> Option<String> {
        (self.is_missing && issue.rule.kept_by != KeptBy::Nothing)
            .then(|| "record with memtrace --holders to see which Python object holds them".to_owned())
    }

    /// The holders of these blocks at the scan that [`Self::of_device`] is about. `allocated` is `seq` of their
    /// allocations.
    pub(crate) fn of_blocks(&self, device: i16, allocated: &[u64]) -> Vec<HolderSummary> {
        let held = self.by_device.get(&device).into_iter().flat_map(|scan| &scan.held);
        let meant = held.filter(|held| held.block.device == device && allocated.contains(&held.block.seq));
        grouped(&meant.collect::<Vec<_>>(), HOLDERS_OF_ISSUE).0
    }

    /// The holders of the blocks that were allocated at this event of a device, at the next scan.
    pub(crate) fn after(&self, device: i16, seq: u64) -> Vec<HolderSummary> {
        let held = self.after.get(&(device, seq)).into_iter().flatten();
        grouped(&held.collect::<Vec<_>>(), HOLDERS_AFTER_RELEASE).0
    }

    /// The holders of the most memory of a device.
    pub(crate) fn of_device(&self, device: i16) -> Option<HoldersSummary> {
        let scan = self.by_device.get(&device)?;
        let held: Vec<&Held> = scan.held.iter().filter(|held| held.block.device == device).collect();
        let (largest, left_out) = grouped(&held, HOLDERS_OF_DEVICE);
        Some(HoldersSummary { scan: scan.summary(), held_bytes: scan.bytes(device), largest, left_out })
    }
}

impl Scan {
    fn new(facts: HolderScan, mut held: Vec<Held>) -> Scan {
        held.sort_by_key(|held| (held.block.seq, held.block.device));
        Scan { facts, held }
    }
}

/// A path in parts: what is inside of brackets, and what is not.
fn parts(path: &str) -> Vec<(&str, bool)> {
    let (mut parts, mut rest) = (Vec::new(), path);
    while let Some((before, after)) = rest.split_once('[') {
        // A key may contain brackets.
        let quoted = after.strip_prefix('\'').and_then(|key| key.find("']")).map(|end| end + 2);
        let Some(end) = quoted.or_else(|| after.find(']')) else { break };
        parts.push((before, false));
        parts.push((after.get(..end).unwrap_or_default(), true));
        rest = after.get(end + 1..).unwrap_or_default();
    }
    parts.push((rest, false));
    parts
}

/// Paths that differ only in keys and positions, as one.
struct Group<'a> {
    /// `None` where the paths differ.
    parts: Vec<(Option<&'a str>, bool)>,
    tensors: u64,
    bytes: u64,
    /// The data type and shape of all of them; `None` if they differ.
    shape: Option<&'a str>,
}

impl Group<'_> {
    fn text(&self) -> String {
        let part = |(text, is_key): &(Option<&str>, bool)| match (text, is_key) {
            (text, true) => format!("[{}]", text.unwrap_or("*")),
            (text, false) => text.unwrap_or_default().to_owned(),
        };
        without_module_tables(&self.parts.iter().map(part).collect::<String>())
    }
}

/// Writes `model._modules['0']._parameters['weight']` as `model.0.weight`, the name that PyTorch uses.
fn without_module_tables(path: &str) -> String {
    let mut text = path.to_owned();
    for table in MODULE_TABLES {
        while let Some(at) = text.find(&format!("{table}[")) {
            let rest = text.get(at + table.len() + 1..).unwrap_or_default();
            let Some(end) = rest.find(']') else { break };
            let key = rest.get(..end).unwrap_or_default().trim_matches('\'').to_owned();
            text.replace_range(at..at + table.len() + 1 + end + 1, &format!(".{key}"));
        }
    }
    text
}

/// The keys of a path that are names, not numbers and not the names of modules.
fn named_keys<'a>(parts: &[(&'a str, bool)]) -> Vec<&'a str> {
    let is_named = |before: &str, key: &str| {
        key.starts_with('\'') && key.contains(char::is_alphabetic) && !MODULE_TABLES.iter().any(|t| before.ends_with(t))
    };
    let pairs = parts.windows(2).filter_map(|pair| if let [before, key] = pair { Some((before, key)) } else { None });
    pairs.filter(|(before, key)| key.1 && !before.1 && is_named(before.0, key.0)).map(|(_, key)| key.0).collect()
}

/// The holders by bytes in descending order, at most `limit`, and how many more there are.
fn grouped(held: &[&Held], limit: usize) -> (Vec<HolderSummary>, u64) {
    let pattern = |parts: &[(&'_ str, bool)]| -> Vec<Option<String>> {
        parts.iter().map(|(text, is_key)| (!is_key).then(|| (*text).to_owned())).collect()
    };
    // A few names are worth a line each: the entries of a log. Many are data: the layers of a model.
    let mut named: BTreeMap<Vec<Option<String>>, BTreeSet<Vec<&str>>> = BTreeMap::new();
    for held in held {
        let parts = parts(&held.path);
        let names = named.entry(pattern(&parts)).or_default();
        if names.len() <= NAMED_KEYS {
            names.insert(named_keys(&parts));
        }
    }
    let mut groups: BTreeMap<(Vec<Option<String>>, Vec<&str>), Group<'_>> = BTreeMap::new();
    for held in held {
        let parts = parts(&held.path);
        let pattern = pattern(&parts);
        let are_few = named.get(&pattern).is_some_and(|names| names.len() <= NAMED_KEYS);
        let key = (pattern, if are_few { named_keys(&parts) } else { Vec::new() });
        let group = groups.entry(key).or_insert_with(|| Group {
            parts: parts.iter().map(|(text, is_key)| (Some(*text), *is_key)).collect(),
            tensors: 0,
            bytes: 0,
            shape: Some(&*held.shape),
        });
        for (known, (text, _)) in group.parts.iter_mut().zip(&parts) {
            known.0 = known.0.filter(|known| known == text);
        }
        group.shape = group.shape.filter(|shape| **shape == *held.shape);
        group.tensors += 1;
        group.bytes += held.block.size;
    }
    let mut all: Vec<HolderSummary> = groups
        .values()
        .map(|group| HolderSummary {
            path: group.text(),
            tensors: group.tensors,
            bytes: group.bytes,
            shape: group.shape.filter(|shape| !shape.is_empty()).map(str::to_owned),
        })
        .collect();
    all.sort_by(|a, b| (Reverse(a.bytes), &a.path).cmp(&(Reverse(b.bytes), &b.path)));
    let left_out = all.len().saturating_sub(limit) as u64;
    all.truncate(limit);
    (all, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(paths: &[&str]) -> Vec<(String, u64, u64)> {
        let block = HeldBlock { device: 0, stack: StackId(1), context: ContextId::NONE, seq: 1, size: 512 };
        let held = paths.iter().map(|path| Held { path: (*path).into(), shape: "".into(), block });
        let held: Vec<Held> = held.collect();
        let all = grouped(&held.iter().collect::<Vec<_>>(), 2).0;
        all.into_iter().map(|holder| (holder.path, holder.tensors, holder.bytes)).collect()
    }

    #[test]
    fn paths_that_differ_in_keys_are_one_pattern() {
        let one = texts(&["__main__.history[0]", "__main__.history[12]", "__main__.best"]);
        assert_eq!(one, [("__main__.history[*]".into(), 2, 1024), ("__main__.best".into(), 1, 512)]);
        let log = texts(&["__main__.trainer.state.log['loss'][0]", "__main__.trainer.state.log['loss'][1]"]);
        assert_eq!(log, [("__main__.trainer.state.log['loss'][*]".into(), 2, 1024)]);
        assert_eq!(texts(&["frame validate: preds[3]"]), [("frame validate: preds[3]".into(), 1, 512)]);
        let keys = texts(&["m.cache['a[0]'][1]", "m.cache['b]'][1]", "m.cache['b]'][2]"]);
        assert_eq!(keys, [("m.cache['b]'][*]".into(), 2, 1024), ("m.cache['a[0]'][1]".into(), 1, 512)]);
        let many: Vec<String> = (0..=NAMED_KEYS).map(|at| format!("m.cache['layer{at}']")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(texts(&many), [("m.cache[*]".into(), 5, 5 * 512)]);
    }

    #[test]
    fn tensors_of_one_shape_have_a_shape() {
        let block = HeldBlock { device: 0, stack: StackId(1), context: ContextId::NONE, seq: 1, size: 512 };
        let held = |path: &str, shape: &str| Held { path: path.into(), shape: shape.into(), block };
        let all =
            [held("m.a[0]", "int64[2]"), held("m.a[1]", "int64[2]"), held("m.b[0]", "int64[2]"), held("m.b[1]", "")];
        let found = grouped(&all.iter().collect::<Vec<_>>(), 2).0;
        let shapes: Vec<_> = found.iter().map(|holder| (&*holder.path, holder.shape.as_deref())).collect();
        assert_eq!(shapes, [("m.a[*]", Some("int64[2]")), ("m.b[*]", None)]);
    }

    #[test]
    fn modules_have_pytorchs_names() {
        let one = texts(&["frame main: model._modules['0']._parameters['weight']"]);
        assert_eq!(one, [("frame main: model.0.weight".into(), 1, 512)]);
        let all = texts(&["m.net._modules['0']._buffers['mean']", "m.net._modules['1']._buffers['mean']"]);
        assert_eq!(all, [("m.net.*.mean".into(), 2, 1024)]);
    }

    #[test]
    fn malformed_paths_are_kept() {
        for path in ["", "[", "a[", "a['x", "a]b", "[]"] {
            assert_eq!(texts(&[path]).len(), 1, "{path}");
        }
    }
}
