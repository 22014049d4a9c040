//! The functions that a program calls again and again: the endpoints of a server, the phases of a
//! reinforcement-learning loop.
//!
//! The outermost functions that are called repeatedly count, so what they call themselves has no row. A function that
//! only passes each call on to one of several others stands for none: these others do. A function that goes on at an
//! earlier line is a loop if it calls repeated functions, else it is called again.

use std::collections::BTreeMap;

use memtrace_trace::ids::FrameId;

use super::calls::{CallTotals, Calls, Work};

/// A function with so many calls is called repeatedly.
const MIN_CALLS: u64 = 4;
/// The minimum number of calls of all functions.
const MIN_ALL_CALLS: u64 = 8;
/// The maximum number of functions. Further ones are only counted.
const MAX_FUNCTIONS: usize = 64;
/// A dispatcher calls one function each time, except in 12.5 % (1/8) of the calls. These allocate most of what it
/// needs.
const DISPATCHES_ALONE: u64 = 8;
const DISPATCHED_SHARE: (u64, u64) = (3, 4);
/// In reinforcement learning, functions alternate that train and that only compute. One is called at most so many times
/// as often as the other.
const ALTERNATES: u64 = 2;

/// The sums over all calls of one function.
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
    /// The functions, if they say something. `has_ranges` means that the program names ranges itself.
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

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{Definitions, Frame, StackNode};
    use memtrace_trace::ids::{StackId, ThreadId};

    use super::super::calls::CallCollector;
    use super::super::category::BlockAllocation;
    use super::super::phase::Phase;
    use super::*;

    /// The functions of a program that allocates 100 bytes in each of these stacks, written from the outermost
    /// function: `main:3 search:7`. Each begins with a phase if it is none of a server.
    fn functions(events: &[&str], has_ranges: bool) -> Vec<(String, u64, u64)> {
        let mut definitions = Definitions {
            frames: vec![Frame::default()],
            stacks: vec![StackNode::default()],
            ..Definitions::default()
        };
        let mut allocations = Vec::new();
        for event in events {
            let (mut parent, mut phase) = (StackId::NONE, Phase::Other);
            for word in event.split(' ') {
                let Some((name, line)) = word.split_once(':') else {
                    phase = Phase::from_name(word).unwrap();
                    continue;
                };
                let frame = Frame {
                    name: name.into(),
                    qualname: name.into(),
                    filename: "a.py".into(),
                    line: line.parse().unwrap(),
                    ..Frame::default()
                };
                let id = definitions.frames.iter().position(|one| *one == frame).unwrap_or_else(|| {
                    definitions.frames.push(frame);
                    definitions.frames.len() - 1
                });
                let node = StackNode { parent, frame: FrameId(id as u32) };
                let at = definitions.stacks.iter().position(|one| *one == node).unwrap_or_else(|| {
                    definitions.stacks.push(node);
                    definitions.stacks.len() - 1
                });
                parent = StackId(at as u32);
            }
            allocations.push((parent, phase));
        }
        let mut calls = CallCollector::new(&definitions);
        for (at, (stack, phase)) in allocations.into_iter().enumerate() {
            let position = BlockAllocation::for_tests(1).position;
            let mut block = BlockAllocation::of_forward(at as u64 + 1, 100, stack, position);
            block.phase = phase;
            calls.allocate(&block, ThreadId(1), 100, at, 100);
        }
        calls.close();
        let name = |frame| definitions.frame(frame).unwrap().name.to_string();
        let found = CalledFunctions::of(&calls.into(), has_ranges).functions;
        found.iter().map(|one| (name(one.frame), one.calls, one.allocated)).collect()
    }

    fn row(name: &str, calls: u64, allocated: u64) -> (String, u64, u64) {
        (name.to_owned(), calls, allocated)
    }

    #[test]
    fn the_outermost_functions_that_are_called_repeatedly_have_rows() {
        let once = ["main:1 build:2"];
        let request = ["main:5 search:10", "main:5 search:11 embed:20", "main:6 recommend:30"];
        let events: Vec<&str> = once.into_iter().chain(request.into_iter().cycle().take(18)).collect();
        assert_eq!(functions(&events, true), [row("search", 6, 1200), row("recommend", 6, 600)]);
    }

    #[test]
    fn functions_behind_one_that_only_passes_calls_on_have_rows() {
        let request = ["main:5 handle:8 search:10", "main:6", "main:5 handle:9 recommend:30", "main:6"];
        let events: Vec<&str> = request.into_iter().cycle().take(24).collect();
        assert_eq!(functions(&events, true), [row("search", 6, 600), row("recommend", 6, 600)]);
        // A function that calls both is what is called.
        let request = ["main:5 handle:8 search:10", "main:5 handle:9 recommend:30", "main:6"];
        let events: Vec<&str> = request.into_iter().cycle().take(24).collect();
        assert_eq!(functions(&events, false), [row("handle", 8, 1600)]);
        assert_eq!(functions(&events, true), [], "one function says nothing beside ranges");
    }

    #[test]
    fn a_function_that_goes_on_at_an_earlier_line_is_a_loop_or_is_called_again() {
        let events: Vec<&str> = ["main:5 score:10", "main:5 score:12"].into_iter().cycle().take(20).collect();
        assert_eq!(functions(&events, false), [row("score", 10, 2000)]);
        let events: Vec<&str> = ["main:5", "main:6 score:12"].into_iter().cycle().take(20).collect();
        assert_eq!(functions(&events, false), [row("score", 10, 1000)]);
        assert_eq!(functions(&events[..14], false), [], "seven calls are few");
    }

    #[test]
    fn training_has_rows_only_if_it_takes_turns_with_generation_or_rollouts() {
        let loops = |computes: &'static str, trained: usize| -> Vec<&'static str> {
            let train = ["forward main:6 train:20", "backward main:6 train:21", "optimizer main:7 sync:30"];
            let one = std::iter::once(computes).chain(train.into_iter().cycle().take(3 * trained));
            std::iter::repeat_n(one.collect::<Vec<_>>(), 6).flatten().collect()
        };
        let names = |events: &[&str]| functions(events, false).into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
        assert_eq!(names(&loops("rollout main:5 collect:10", 1)), ["train", "collect", "sync"]);
        assert_eq!(names(&loops("generate main:5 collect:10", 8)), ["train", "sync", "collect"]);
        assert_eq!(names(&loops("eval main:5 validate:10", 1)), ["train", "validate", "sync"]);
        assert_eq!(names(&loops("eval main:5 validate:10", 8)), [""; 0], "an evaluation now and then");
        assert_eq!(names(&loops("data main:5 load:10", 1)), [""; 0], "the parts of a step");
    }
}
