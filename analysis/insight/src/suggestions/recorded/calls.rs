//! The calls of some modules: when each began and ended, which blocks it allocated, and when its backward pass began.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use memtrace_trace::ids::ContextId;

use super::Recorded;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;

/// The last blocks of a call that outlive it are its results.
pub(crate) const RESULTS: usize = 2;

/// For each context: the module of a set that is being called, or whose call made the node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Members {
    /// By context: the number of the member, from 1; 0 without one.
    of_context: Vec<u32>,
    /// The number of members.
    pub(crate) count: usize,
    /// By member: the call that stands for it, which has its class and its path.
    pub(crate) calls: Vec<ContextId>,
}

impl Members {
    /// The outermost modules of some classes. Calls inside them belong to them.
    pub(crate) fn of(recorded: &Recorded<'_>, classes: &BTreeSet<&str>) -> Members {
        Members::without(recorded, classes, &BTreeSet::new())
    }

    /// The outermost modules of some classes that contain no several modules of their own class: the layers of an
    /// `nn.Sequential` that are `nn.Sequential` themselves.
    pub(crate) fn repeated(recorded: &Recorded<'_>, classes: &BTreeSet<&str>) -> Members {
        let definitions = recorded.definitions;
        let mut contained: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for call in definitions.nn_calls.values().filter(|call| classes.contains(&*call.class)) {
            for (_, around) in definitions.nn_call_chain(call.caller) {
                if around.class == call.class && around.object != call.object {
                    contained.entry(around.object).or_default().insert(call.object);
                }
            }
        }
        let several = contained.into_iter().filter(|(_, modules)| modules.len() > 1);
        Members::without(recorded, classes, &several.map(|(object, _)| object).collect())
    }

    /// `containers` are modules of the classes that are no members themselves.
    fn without(recorded: &Recorded<'_>, classes: &BTreeSet<&str>, containers: &BTreeSet<u64>) -> Members {
        let definitions = recorded.definitions;
        let mut members = Members::default();
        let mut of_call: BTreeMap<ContextId, u32> = BTreeMap::new();
        let mut numbers: BTreeMap<(u64, &str), u32> = BTreeMap::new();
        // A caller's id is smaller than the id of its call.
        for (id, call) in &definitions.nn_calls {
            let inherited = of_call.get(&call.caller).copied().unwrap_or(0);
            let number = match inherited {
                0 if classes.contains(&*call.class) && !containers.contains(&call.object) => {
                    let next = numbers.len() as u32 + 1;
                    let number = *numbers.entry((call.object, &*call.class)).or_insert(next);
                    if number == next {
                        members.calls.push(*id);
                    }
                    number
                }
                inherited => inherited,
            };
            of_call.insert(*id, number);
        }
        members.count = numbers.len();
        let contexts = recorded.contexts();
        let number = |index| of_call.get(&contexts.module(ContextId(index as u32))).copied().unwrap_or(0);
        let last = of_call.keys().next_back().map_or(0, |id| id.index() + 1);
        members.of_context = (0..definitions.contexts.len().max(last)).map(number).collect();
        members
    }

    /// The modules that the program calls itself.
    pub(crate) fn outermost(recorded: &Recorded<'_>) -> Members {
        let calls = recorded.definitions.nn_calls.values().filter(|call| call.caller.is_none());
        Members::of(recorded, &calls.map(|call| &*call.class).collect())
    }

    /// The member of a context, from 1; 0 without one.
    #[inline]
    pub(crate) fn get(&self, context: ContextId) -> u32 {
        self.of_context.get(context.index()).copied().unwrap_or(0)
    }
}

/// One call of a member in a forward pass with gradients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    pub(crate) member: u32,
    /// The indices of its events, with possibly some of other threads between them.
    pub(crate) events: Range<usize>,
    /// The blocks that it allocated, in order.
    pub(crate) blocks: Vec<u32>,
}

impl Call {
    /// `seq` of the last event.
    pub(crate) fn end(&self, recorded: &Recorded<'_>) -> u32 {
        recorded.events[self.events.end - 1].seq
    }
}

/// The calls of all members in the forward passes of training steps, in order.
pub(crate) fn calls(recorded: &Recorded<'_>, members: &Members) -> Vec<Call> {
    calls_in(recorded, members, |block| block.start.phase == Phase::Forward)
}

/// The calls of all members in forward passes with gradients, those of evaluations included, in order.
pub(crate) fn calls_with_gradients(recorded: &Recorded<'_>, members: &Members) -> Vec<Call> {
    calls_in(recorded, members, |block| {
        block.start.phase == Phase::Forward || block.start.phase.is_forward_only() && !block.start.is_without_gradients
    })
}

fn calls_in(recorded: &Recorded<'_>, members: &Members, counts: impl Fn(&BlockLifetime) -> bool) -> Vec<Call> {
    let contexts = recorded.contexts();
    let mut calls: Vec<Call> = Vec::new();
    let mut running = false;
    for (index, event) in recorded.events.iter().enumerate() {
        if contexts.is_node(event.context) {
            running = false;
            continue;
        }
        let block: &BlockLifetime = &recorded.blocks[event.block as usize];
        // Another thread can load data meanwhile.
        if event.context.is_none() && event.allocates && block.start.phase == Phase::Data {
            continue;
        }
        let member = members.get(event.context);
        let continues = running && calls.last().is_some_and(|call| call.member == member);
        if member == 0 || event.allocates && !counts(block) {
            running = false;
        } else if continues {
            if let Some(call) = calls.last_mut() {
                call.events.end = index + 1;
                if event.allocates {
                    call.blocks.push(event.block);
                }
            }
        } else if event.allocates {
            running = true;
            calls.push(Call { member, events: index..index + 1, blocks: vec![event.block] });
        } else {
            running = false;
        }
    }
    calls
}

/// The outermost calls of modules with gradients.
pub(crate) fn outermost_calls(recorded: &Recorded<'_>) -> Vec<Call> {
    calls_with_gradients(recorded, &Members::outermost(recorded))
}
