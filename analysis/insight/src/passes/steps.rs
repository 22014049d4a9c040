//! Finds where steps end, from the ranges that PyTorch itself marks: `Optimizer.step#...`, `Optimizer.zero_grad#...`,
//! `enumerate(DataLoader)#...`.
//!
//! An optimizer is identified by the class in its range's name and by the stack that calls it. A step is the shortest
//! part of the program in which no optimizer steps twice:
//!
//! - A step ends with the last optimizer call before an optimizer of this step steps again. A backward pass or a data
//!   loader call must come in between, so an optimizer that steps group by group steps once. Two networks that are
//!   trained in turn, each with its own optimizer, share a step.
//! - An optimizer that is called for the first time, after other optimizers of the step, belongs to that step. If it is
//!   also the next one to be called, the program has turned to other work, and it begins a step of its own.
//! - If gradients are cleared twice at one place, with a backward pass and no optimizer step in between, a step was
//!   skipped. A `GradScaler` that finds infinities does that. The skipped step ends at the second clearing. It ends
//!   earlier if a data loader was called after the backward pass: there.
//! - Optimizers that step inside the backward pass, parameter by parameter, do not end steps.
//!
//! [`super::phase`] decides where the next step begins. This pass streams the recording once if it has such ranges,
//! else not at all.

use std::collections::HashMap;

use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

use crate::rules::{LabelRule, Meaning, label_rule};
use memtrace_input::Recording;

/// The maximum number of distinct optimizers in a step, and of places that clear gradients.
const MAX_SITES: usize = 256;

/// The ends of steps. Needs eight bytes per step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepEnds {
    ends: Vec<u64>,
    loaders: bool,
}

/// The meaning of each label; `None` for the program's own labels.
#[derive(Clone, Debug, Default)]
pub struct LabelRules(Vec<Option<&'static LabelRule>>);

impl LabelRules {
    /// Takes the labels of a recording.
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

    /// The rule for the label of a range event.
    #[inline]
    pub fn get(&self, e: &Event) -> Option<&'static LabelRule> {
        *self.0.get(usize::try_from(e.addr).ok()?)?
    }

    fn any(&self, meaning: Meaning) -> bool {
        self.0.iter().flatten().any(|rule| rule.meaning == meaning)
    }
}

impl StepEnds {
    /// Takes a recording. Empty if the recording has no range of an optimizer's step.
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
                    finder.observe_label(e);
                } else if e.flags.contains(Flags::IN_BACKWARD) {
                    finder.last_backward = e.seq;
                }
            }
        });
        finder.finish()
    }

    /// The event numbers (`seq`) after which a step has ended, in order.
    pub fn all(&self) -> &[u64] {
        &self.ends
    }

    /// Whether most steps begin with a call of a data loader.
    pub fn loaders(&self) -> bool {
        self.loaders
    }
}

/// An optimizer, or a place where gradients are cleared: label and stack.
type Site = (u64, StackId);

/// The last time that one place cleared gradients.
struct Cleared {
    site: Site,
    seq: u64,
    calls: u64,
}

#[derive(Default)]
struct Finder {
    rules: LabelRules,
    has_nodes: bool,
    /// By thread: the number of open optimizer ranges.
    depths: HashMap<ThreadId, u32>,
    ends: Vec<u64>,
    /// The optimizers that have stepped in the current step.
    stepped: Vec<Site>,
    /// The number of optimizers that stepped in the previous step.
    stepped_before: usize,
    /// `seq` of the start and the end of the last optimizer range.
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
    fn observe_label(&mut self, e: &Event) {
        let Some(rule) = self.rules.get(e) else { return };
        let starts = e.action == Action::RangeStart;
        match rule.meaning {
            Meaning::OptimizerStep if !e.flags.contains(Flags::IN_BACKWARD) => {
                let depth = self.depths.entry(e.thread).or_default();
                if starts {
                    *depth += 1;
                    if *depth == 1 {
                        self.optimizer_called((e.addr, e.stack), e.seq);
                    }
                } else if *depth > 0 {
                    *depth -= 1;
                    if *depth == 0 {
                        self.last_end = e.seq;
                    }
                }
            }
            // A closure that an optimizer calls can clear gradients any number of times.
            Meaning::ZeroGrad if starts && self.depths.values().all(|depth| *depth == 0) => {
                self.gradients_cleared((e.addr, e.stack), e.seq);
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

    fn optimizer_called(&mut self, site: Site, seq: u64) {
        self.calls += 1;
        // The recording does not show a backward pass that is replayed as a CUDA graph. It can show the data loader's
        // call for it.
        let worked = self.backward_since(self.last_start) || self.last_loader > self.last_start;
        let joined = self.joined.take();
        if !self.stepped.contains(&site) {
            if let Some((_, end)) = self.stepped.first().zip(Some(self.last_end)).filter(|_| worked) {
                self.joined = Some((site, end));
            }
            if self.stepped.len() < MAX_SITES {
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

    fn gradients_cleared(&mut self, site: Site, seq: u64) {
        let calls = self.calls;
        let Some(before) = self.cleared.iter_mut().find(|cleared| cleared.site == site) else {
            if self.cleared.len() < MAX_SITES {
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
        // A program that ended between two optimizers of a step had not finished that step.
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

    /// Runs a program of one letter per event and returns it with a `|` at each end of a step. `A` to `C`: steps of
    /// optimizers of one class, called at three places. `z` and `y`: two places that clear gradients. `b`: an event of
    /// a backward pass. `l`: a call of the data loader. `(` and `)`: a step that calls a closure. `h`: a step inside a
    /// backward pass.
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
        let mut marked = String::new();
        let mut next = ends.all().iter().peekable();
        for (letter, last) in program.chars().zip(last_of) {
            marked.push(letter);
            while next.next_if(|end| **end <= last).is_some() {
                marked.push('|');
            }
        }
        marked
    }

    #[test]
    fn each_iteration_of_a_loop_is_a_step() {
        let cases = [
            // a plain loop; gradients cleared after or before; gradient accumulation
            ("bAbAbA", "bA|bA|bA|"),
            ("bAzbAzbAz", "bA|zbA|zbA|z"),
            ("lzbAlzbAlzbA", "lzbA|lzbA|lzbA|"),
            ("bbbAbbbA", "bbbA|bbbA|"),
            // two optimizers after one backward pass; two networks trained in turn
            ("bABbAB", "bAB|bAB|"),
            ("zbAybBzbAybB", "zbAybB|zbAybB|"),
            ("bAbAbAbBbAbAbAbB", "bA|bA|bAbB|bA|bA|bAbB|"),
            // an optimizer that steps group by group; one optimizer first, then another
            ("bAAAbAAA", "bAAA|bAAA|"),
            ("bAbAbBbBbB", "bA|bA|bB|bB|bB|"),
            // closures; steps inside a backward pass
            ("(zbzb)(zbzb)", "(zbzb)|(zbzb)|"),
            ("bhbhbhbh", "bhbhbhbh"),
            // a skipped step
            ("zbAzbzbAzbA", "zbA|zbz|bA|zbA|"),
            ("bAzbzbAz", "bA|zbz|bA|z"),
            ("lzbAlzblzbA", "lzbA|lzbl|zbA|"),
            // gradients cleared for one optimizer after the other
            ("zzbABzzbAB", "zzbAB|zzbAB|"),
            // a recording that ends in the middle of a step
            ("bAbBbAbBbA", "bAbB|bAbB|bA"),
            ("bAbAb", "bA|bA|b"),
            // backward passes that are replayed as CUDA graphs
            ("lbAlAlA", "lbA|lA|lA|"),
        ];
        for (program, expected) in cases {
            let expected: String = expected.into();
            assert_eq!(steps(program), expected, "{program}");
        }
    }
}
