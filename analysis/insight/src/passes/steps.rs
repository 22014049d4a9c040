//! Where steps end, as the ranges say that PyTorch marks itself: `Optimizer.step#...`, `Optimizer.zero_grad#...`,
//! `enumerate(DataLoader)#...`.
//!
//! An optimizer is known by the class in its range's name and by the stack that calls it. A step is the shortest stretch of the program in
//! which no optimizer steps twice:
//!
//! - it ends with the last call of an optimizer before one that has stepped in it steps again, with a backward or a data loader's call
//!   in between (an optimizer that steps group by group steps once); two networks that are trained in turn, each with its own
//!   optimizer, share a step;
//! - an optimizer that is called for the first time where others went on belongs to their step, unless it is the next to be called,
//!   too: then the program has turned to other work;
//! - where gradients are cleared at a place for the second time, with a backward and no optimizer's step in between, a step was skipped
//!   (a `GradScaler` that found infinities does that): it ends there, or where a data loader was called in between after the backward;
//! - optimizers that step inside of the backward, parameter by parameter, say nothing.
//!
//! The next step begins with what follows; see [`super::phase`]. Takes one streaming of the recording, where it has such ranges.

use std::collections::HashMap;

use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

use crate::rules::{LabelRule, Meaning, label_rule};
use memtrace_input::Recording;

/// Optimizers and places that clear gradients told apart in a step.
const MOST_SITES: usize = 256;

/// Where steps end. Eight bytes a step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepEnds {
    ends: Vec<u64>,
    loaders: bool,
}

/// What each label means; nothing for the program's own.
#[derive(Clone, Debug, Default)]
pub struct LabelRules(Vec<Option<&'static LabelRule>>);

impl LabelRules {
    /// Of a recording's labels.
    pub fn of(definitions: &Definitions) -> LabelRules {
        let mut rules = Vec::new();
        for (id, label) in &definitions.labels {
            if let Some(rule) = label_rule(label) {
                let index = *id as usize;
                rules.resize(rules.len().max(index + 1), None);
                rules[index] = Some(rule);
            }
        }
        LabelRules(rules)
    }

    /// The rule for the label of a range's event.
    #[inline]
    pub fn get(&self, e: &Event) -> Option<&'static LabelRule> {
        *self.0.get(usize::try_from(e.addr).ok()?)?
    }

    fn any(&self, meaning: Meaning) -> bool {
        self.0.iter().flatten().any(|rule| rule.meaning == meaning)
    }
}

impl StepEnds {
    /// From a recording; nothing where no optimizer says that it steps.
    pub fn of(recording: &dyn Recording) -> StepEnds {
        let rules = LabelRules::of(recording.definitions());
        if !rules.any(Meaning::OptimizerStep) {
            return StepEnds::default();
        }
        let has_nodes = recording.definitions().contexts.iter().any(|c| !c.node.is_empty());
        let mut finder = Finder { rules, has_nodes, ..Finder::default() };
        recording.stream(&mut |events| {
            for e in events {
                if e.source == Source::Label {
                    finder.label(e);
                } else if e.flags.contains(Flags::IN_BACKWARD) {
                    finder.last_backward = e.seq;
                }
            }
        });
        finder.finish()
    }

    /// The places in the recording after which a step has ended: each is the number of an event.
    pub fn all(&self) -> &[u64] {
        &self.ends
    }

    /// Whether most steps begin with a call of a data loader.
    pub fn loaders(&self) -> bool {
        self.loaders
    }
}

/// An optimizer, or a place where gradients are cleared.
type Site = (u64, StackId);

/// Where gradients were cleared.
struct Cleared {
    site: Site,
    seq: u64,
    calls: u64,
}

#[derive(Default)]
struct Finder {
    rules: LabelRules,
    has_nodes: bool,
    /// Open ranges of optimizers, by thread.
    depths: HashMap<ThreadId, u32>,
    ends: Vec<u64>,
    /// Which optimizers have stepped in the present step.
    stepped: Vec<Site>,
    /// How many had in the one before.
    stepped_before: usize,
    /// Where the last of them began and ended.
    last_start: u64,
    last_end: u64,
    /// An optimizer that has joined a step, and where that step would have ended without it.
    joined: Option<(Site, u64)>,
    calls: u64,
    cleared: Vec<Cleared>,
    last_backward: u64,
    last_loader: u64,
    loaders: usize,
    loader_in_step: bool,
}

impl Finder {
    fn label(&mut self, e: &Event) {
        let Some(rule) = self.rules.get(e) else { return };
        let starts = e.action == Action::RangeStart;
        match rule.meaning {
            Meaning::OptimizerStep if !e.flags.contains(Flags::IN_BACKWARD) => {
                let depth = self.depths.entry(e.thread).or_default();
                if starts {
                    *depth += 1;
                    if *depth == 1 {
                        self.begins((e.addr, e.stack), e.seq);
                    }
                } else if *depth > 0 {
                    *depth -= 1;
                    if *depth == 0 {
                        self.last_end = e.seq;
                    }
                }
            }
            // A closure that an optimizer calls clears gradients as often as it likes.
            Meaning::ZeroGrad if starts && self.depths.values().all(|depth| *depth == 0) => {
                self.clears((e.addr, e.stack), e.seq);
            }
            Meaning::Data if starts => {
                self.last_loader = e.seq;
                self.loader_in_step = true;
            }
            _ => {}
        }
    }

    fn backward_since(&self, seq: u64) -> bool {
        !self.has_nodes || self.last_backward > seq
    }

    fn begins(&mut self, site: Site, seq: u64) {
        self.calls += 1;
        // A backward that is replayed as a CUDA graph is not seen; the batch for it may be.
        let worked = self.backward_since(self.last_start) || self.last_loader > self.last_start;
        let joined = self.joined.take();
        if !self.stepped.contains(&site) {
            if let Some((_, end)) = self.stepped.first().zip(Some(self.last_end)).filter(|_| worked) {
                self.joined = Some((site, end));
            }
            if self.stepped.len() < MOST_SITES {
                self.stepped.push(site);
            }
        } else if worked {
            if let Some((_, end)) = joined.filter(|(other, _)| *other == site) {
                self.end(end);
            }
            self.end(self.last_end);
            self.stepped_before = self.stepped.len();
            self.stepped = vec![site];
        } else {
            self.joined = joined;
        }
        self.last_start = seq;
    }

    fn clears(&mut self, site: Site, seq: u64) {
        let calls = self.calls;
        let Some(before) = self.cleared.iter_mut().find(|cleared| cleared.site == site) else {
            if self.cleared.len() < MOST_SITES {
                self.cleared.push(Cleared { site, seq, calls });
            }
            return;
        };
        let Cleared { seq: since, calls: then, .. } = std::mem::replace(before, Cleared { site, seq, calls });
        if calls != then || !self.backward_since(since) || !self.has_nodes {
            return;
        }
        if !self.stepped.is_empty() {
            self.end(self.last_end);
            self.stepped_before = self.stepped.len();
            self.stepped.clear();
        }
        self.joined = None;
        let loader_after = self.last_loader > self.last_backward;
        self.end(if loader_after { self.last_loader } else { seq });
    }

    fn end(&mut self, seq: u64) {
        self.loaders += usize::from(std::mem::take(&mut self.loader_in_step));
        self.ends.push(seq);
    }

    fn finish(mut self) -> StepEnds {
        // A program that ended between two optimizers of a step was still in it.
        let whole = self.stepped.len() >= self.stepped_before;
        if !self.stepped.is_empty() && whole && self.depths.values().all(|depth| *depth == 0) {
            self.end(self.last_end);
        }
        StepEnds { loaders: self.loaders * 2 > self.ends.len(), ends: self.ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::definition::LabelOrigin;
    use memtrace_trace::file::{Context, Label};

    /// Letters, one event each: `A` to `C` optimizers' steps (of one class, called at three places), `z` and `y` two places that clear
    /// gradients, `b` a backward's event, `l` a call of the data loader, `(` and `)` a step that calls a closure, `h` a step in a
    /// backward. Gives the letters, and a bar wherever a step has ended.
    fn steps(program: &str) -> String {
        let names =
            ["Optimizer.step#Adam.step", "Optimizer.zero_grad#Adam.zero_grad", "enumerate(DataLoader)#X.__next__"];
        let mut recording = MemoryRecording::default();
        recording.definitions.contexts = vec![Context::default(), Context { node: "N".into(), ..Context::default() }];
        for (id, text) in (1..).zip(names) {
            let label = Label { origin: LabelOrigin::RecordFunction, text: text.into() };
            recording.definitions.labels.insert(id, label);
        }
        let mut last_of = Vec::new();
        let mut seq = 0;
        for letter in program.chars() {
            let mut add = |action, label: u64, stack: u32, flags| {
                seq += 1;
                let (addr, stack) = (label, StackId(stack));
                let source = if label == 0 { Source::Torch } else { Source::Label };
                recording.events.push(Event { seq, source, action, addr, stack, flags, ..Event::EMPTY });
            };
            let (start, end, none) = (Action::RangeStart, Action::RangeEnd, Flags::default());
            match letter {
                'A'..='C' => {
                    add(start, 1, letter as u32, none);
                    add(end, 1, 0, none);
                }
                '(' => add(start, 1, 99, none),
                ')' => add(end, 1, 0, none),
                'h' => {
                    add(start, 1, 98, Flags::IN_BACKWARD);
                    add(end, 1, 0, Flags::IN_BACKWARD);
                }
                'y' | 'z' => add(start, 2, letter as u32, none),
                'l' => add(start, 3, 0, none),
                'b' => add(Action::Alloc, 0, 0, Flags::IN_BACKWARD),
                _ => panic!("{letter}"),
            }
            last_of.push(seq);
        }
        let ends = StepEnds::of(&recording);
        let mut told = String::new();
        let mut next = ends.all().iter().peekable();
        for (letter, last) in program.chars().zip(last_of) {
            told.push(letter);
            while next.next_if(|end| **end <= last).is_some() {
                told.push('|');
            }
        }
        told
    }

    #[test]
    fn each_turn_of_a_loop_is_a_step() {
        let cases = [
            // plain; with gradients cleared behind or before; accumulation
            ("bAbAbA", "bA|bA|bA|"),
            ("bAzbAzbAz", "bA|zbA|zbA|z"),
            ("lzbAlzbAlzbA", "lzbA|lzbA|lzbA|"),
            ("bbbAbbbA", "bbbA|bbbA|"),
            // two optimizers after one backward; two networks in turn
            ("bABbAB", "bAB|bAB|"),
            ("zbAybBzbAybB", "zbAybB|zbAybB|"),
            ("bAbAbAbBbAbAbAbB", "bA|bA|bAbB|bA|bA|bAbB|"),
            // group by group; the same optimizer, then another
            ("bAAAbAAA", "bAAA|bAAA|"),
            ("bAbAbBbBbB", "bA|bA|bB|bB|bB|"),
            // closures; steps inside of a backward
            ("(zbzb)(zbzb)", "(zbzb)|(zbzb)|"),
            ("bhbhbhbh", "bhbhbhbh"),
            // a step that is skipped
            ("zbAzbzbAzbA", "zbA|zbz|bA|zbA|"),
            ("bAzbzbAz", "bA|zbz|bA|z"),
            ("lzbAlzblzbA", "lzbA|lzbl|zbA|"),
            // gradients cleared one optimizer after the other
            ("zzbABzzbAB", "zzbAB|zzbAB|"),
            // an end in the middle
            ("bAbBbAbBbA", "bAbB|bAbB|bA"),
            ("bAbAb", "bA|bA|b"),
            // backwards that are replayed as CUDA graphs
            ("lbAlAlA", "lbA|lA|lA|"),
        ];
        for (program, expected) in cases {
            let expected: String = expected.into();
            assert_eq!(steps(program), expected, "{program}");
        }
    }
}
