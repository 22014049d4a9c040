//! The functions that a program calls again and again: the endpoints of a server, the phases of a reinforcement-learning
//! loop.
//!
//! The outermost functions that are called repeatedly count, so what they call themselves has no row. A function that only
//! passes each call on to one of several others stands for none: these others do. A function that goes on at an earlier
//! line is a loop if it calls repeated functions, else it is called again.

use std::collections::BTreeMap;

use memtrace_trace::ids::FrameId;

use super::calls::{CallTotals, Calls, Work};

/// A function with so many calls is called repeatedly.
const MIN_CALLS: u64 = 4;
/// The minimum number of calls of all functions.
const MIN_ALL_CALLS: u64 = 8;
/// The maximum number of functions. Further ones are only counted.
const MAX_FUNCTIONS: usize = 64;
/// A dispatcher calls one function each time, but for one in so many calls, and those allocate most of what it needs.
const DISPATCHES_ALONE: u64 = 8;
const DISPATCHED_SHARE: (u64, u64) = (3, 4);
/// In reinforcement learning, functions alternate that train and that only compute. One is called at most so many times as
/// often as the other.
const ALTERNATES: u64 = 2;

/// What the calls of one function did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CalledFunction {
    /// A frame of the function.
    pub frame: FrameId,
    /// The number of calls.
    pub calls: u64,
    /// The number of blocks allocated inside.
    pub allocations: u64,
    /// The number of bytes allocated inside.
    pub allocated: u64,
    /// Bytes allocated inside a call and still allocated when it ended.
    pub kept: u64,
    /// The highest number of allocated bytes at an allocation inside.
    pub peak: u64,
    function: u32,
    work: Work,
}

/// The functions of one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CalledFunctions {
    /// Most allocated bytes first.
    pub functions: Vec<CalledFunction>,
    /// The number of further functions.
    pub left_out: u64,
}

impl CalledFunctions {
    /// The functions, if they say something. `has_ranges`: the program names ranges itself.
    pub fn of(calls: &Calls, has_ranges: bool) -> CalledFunctions {
        let mut by_function: BTreeMap<u32, CalledFunction> = BTreeMap::new();
        let finder = Finder::new(calls);
        for path in finder.repeated() {
            let (of, at) = (calls.totals()[path], calls.tree().paths()[path]);
            let one = by_function.entry(at.function).or_insert_with(|| CalledFunction {
                frame: at.frame,
                function: at.function,
                ..CalledFunction::default()
            });
            one.calls += count(&of);
            one.allocations += of.allocations;
            one.allocated += of.allocated;
            one.kept += of.kept;
            one.peak = one.peak.max(of.peak);
            one.work.add(of.work);
        }
        let mut functions: Vec<CalledFunction> = by_function.into_values().collect();
        let all: u64 = functions.iter().map(|one| one.calls).sum();
        let is_worth = all >= MIN_ALL_CALLS && (functions.len() >= 2 || !has_ranges);
        if !is_worth || calls.work().trains && !alternate(&functions) {
            return CalledFunctions::default();
        }
        functions.sort_by_key(|one| (std::cmp::Reverse(one.allocated), one.function));
        let left_out = functions.len().saturating_sub(MAX_FUNCTIONS) as u64;
        functions.truncate(MAX_FUNCTIONS);
        CalledFunctions { functions, left_out }
    }
}

/// The number of calls. Where frees show the ends of most calls, a function that goes on at an earlier line is a loop.
fn count(of: &CallTotals) -> u64 {
    if of.returns * 2 >= of.calls { of.calls } else { of.calls + of.again }
}

/// Whether functions that train and functions that only compute take turns.
fn alternate(functions: &[CalledFunction]) -> bool {
    let trains = || functions.iter().filter(|one| one.work.backward);
    functions.iter().filter(|one| one.work.forward_only && !one.work.trains).any(|computes| {
        let is_as_often = |trains: &CalledFunction| {
            trains.calls <= computes.calls * ALTERNATES && computes.calls <= trains.calls * ALTERNATES
        };
        trains().any(|trains| computes.work.generates || is_as_often(trains))
    })
}

struct Finder<'a> {
    calls: &'a Calls,
    children: Vec<Vec<usize>>,
}

impl Finder<'_> {
    fn new(calls: &Calls) -> Finder<'_> {
        let paths = calls.tree().paths();
        let mut children = vec![Vec::new(); paths.len()];
        for (at, path) in paths.iter().enumerate().skip(1) {
            children[path.parent].push(at);
        }
        Finder { calls, children }
    }

    /// The paths of the functions that count.
    fn repeated(&self) -> Vec<usize> {
        let mut found: Vec<Vec<usize>> = vec![Vec::new(); self.children.len()];
        // A parent has a smaller number than its child.
        for at in (0..self.children.len()).rev() {
            let inner: Vec<usize> =
                self.children[at].iter().flat_map(|child| std::mem::take(&mut found[*child])).collect();
            let of = self.calls.totals()[at];
            let counts = match self.calls.tree().paths()[at] {
                path if path.function == 0 || path.is_module => false,
                _ if of.calls >= MIN_CALLS => !self.dispatches(&of, &inner),
                _ => of.calls + of.again >= MIN_CALLS && inner.is_empty(),
            };
            found[at] = if counts { vec![at] } else { inner };
        }
        found.into_iter().next().unwrap_or_default()
    }

    /// Whether each call of a function is passed on to one of several others.
    fn dispatches(&self, of: &CallTotals, inner: &[usize]) -> bool {
        let (paths, totals) = (self.calls.tree().paths(), self.calls.totals());
        let Some((first, others)) = inner.split_first() else { return false };
        let is_several = others.iter().any(|other| paths[*other].function != paths[*first].function);
        let calls: u64 = inner.iter().map(|path| count(&totals[*path])).sum();
        let allocated: u64 = inner.iter().map(|path| totals[*path].allocated).sum();
        is_several
            && calls <= of.calls + of.calls / DISPATCHES_ALONE
            && allocated * DISPATCHED_SHARE.1 >= of.allocated * DISPATCHED_SHARE.0
    }
}
