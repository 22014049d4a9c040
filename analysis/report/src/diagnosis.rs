//! Turns signals into findings: decides which of them amount to an issue, and words them with figures and lines.

use std::collections::HashMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::{ContextId, StackId};

use super::explain::state_needed;
use super::places::Places;
use super::units::{count_text, share_text, size_text};
use memtrace_input::Lane;
use memtrace_insight::passes::illness::{Abandoned, Fate, Grown, Mark};
use memtrace_insight::passes::{DeviceStory, Finding, Phase, StackTable, Story};
use memtrace_insight::rules::illnesses as rules;
use memtrace_replay::{HeldByCycle, Names};

/// The minimum size of a finding: this many bytes, and one in this many parts of the peak.
const LEAST: u64 = 1 << 20;
const SHARE: u64 = 50;
/// The minimum fragmentation to report: this many bytes, and one in this many parts of the reserved memory. Less is no
/// fault of the program.
const PINNED: (u64, u64) = (16 << 20, 4);
/// The maximum number of lines listed for one issue.
const PLACES: usize = 3;

/// The inputs for wording signals.
pub(super) struct Doctor<'a> {
    pub(super) places: &'a Places<'a>,
    pub(super) table: &'a StackTable,
    pub(super) ns_per_tick: f64,
    /// Computes the tensor names. Called only if a finding needs them.
    pub(super) names: &'a dyn Fn() -> Names,
    /// Computes the reference cycles that `memtrace --cycles` recorded. Called only if a finding needs them.
    pub(super) cycles: &'a dyn Fn() -> Vec<HeldByCycle>,
}

impl Doctor<'_> {
    /// All findings about a process.
    pub(super) fn findings(&self, story: &Story) -> Vec<Finding> {
        let mut findings = Vec::new();
        for device in &story.devices {
            let at = Device { doctor: self, story: device };
            let graphs = at.growing(&mut findings);
            at.graphs(graphs, &mut findings);
            findings.extend(at.gradients());
            findings.extend(at.garbage());
            findings.extend(at.checkpoint());
            findings.extend(at.wrong_device(story));
            findings.extend(at.fragmentation());
            findings.extend(at.buckets());
            findings.extend(at.workspaces());
            findings.extend(at.optimizer_state());
            findings.extend(at.deferred());
        }
        findings
    }

    fn line(&self, stack: StackId, context: ContextId) -> String {
        let place = self.places.stack(stack, context).place;
        if place.is_empty() { "an unknown place".to_owned() } else { place }
    }
}

struct Device<'a> {
    doctor: &'a Doctor<'a>,
    story: &'a DeviceStory,
}

impl Device<'_> {
    fn peak(&self) -> u64 {
        self.story.peak.usage.allocated
    }

    /// Whether this many bytes are worth a finding.
    fn matters(&self, bytes: u64) -> bool {
        bytes >= LEAST && bytes.saturating_mul(SHARE) >= self.peak()
    }

    /// Whether the peak is at or after the event with `seq` `from`, so that a block allocated there and kept counts for
    /// it.
    fn at_peak(&self, from: u64) -> bool {
        self.story.peak.seq >= from
    }

    fn finding(&self, rule: &'static memtrace_insight::rules::IllnessRule, bytes: u64) -> Finding {
        Finding {
            rule,
            device: self.story.device,
            bytes,
            headline: String::new(),
            evidence: Vec::new(),
            place: None,
            mend: String::new(),
            saves: None,
            files: Vec::new(),
        }
    }

    /// Adds leaks and growing graphs. Returns whether growing graphs are among them.
    fn growing(&self, findings: &mut Vec<Finding>) -> bool {
        let grown = self.story.symptoms.growing.grown();
        let (graph, others): (Vec<Grown>, Vec<Grown>) = grown.iter().partition(|g| g.bits & Mark::GRAPH != 0);
        // A hook that stores one tensor of every layer allocates at one line, so one line alone is no evidence of a
        // graph.
        let mut lines: Vec<_> = graph.iter().map(|g| self.doctor.places.innermost(g.stack)).collect();
        lines.sort_unstable();
        lines.dedup();
        // A backward pass that freed more than stayed did consume its graph. What stayed are results.
        let run: u64 = graph.iter().filter(|g| g.bits & Mark::RUN != 0).map(Grown::slope).sum();
        let consumed = self.story.symptoms.graphs.consumed_in_all / u64::from(self.story.table.steps().max(1));
        let bytes = graph.iter().map(|g| g.bytes).sum();
        let whole = graph.iter().all(|g| g.bits & Mark::RUN == 0) || run >= consumed;
        // Graphs that were freed together are evidence as well.
        let fell = self.story.symptoms.graphs.found().iter().any(|(fate, _)| *fate == Fate::Kept);
        let kept = !graph.is_empty() && (lines.len() >= 2 && whole || fell) && self.matters(bytes);
        // Tensors that grow together with a graph are inputs that the graph keeps.
        let with = |g: &Grown| {
            graph.iter().any(|of| of.first_step.abs_diff(g.first_step) <= 1 && of.blocks.abs_diff(g.blocks) <= 2)
        };
        let (read, others): (Vec<Grown>, Vec<Grown>) = others.into_iter().partition(|g| kept && with(g));
        if kept {
            findings.push(self.graph_grows(&graph, &read));
        }
        let leaks: Vec<Grown> = if kept { others } else { others.into_iter().chain(graph).collect() };
        // One line can leak at several places below it.
        let mut by_line: HashMap<String, Vec<Grown>> = HashMap::new();
        for leak in leaks {
            by_line.entry(self.doctor.line(leak.stack, leak.context)).or_default().push(leak);
        }
        let mut by_line: Vec<(String, Vec<Grown>)> = by_line.into_iter().collect();
        by_line
            .sort_by_key(|(line, leaks)| (std::cmp::Reverse(leaks.iter().map(|g| g.bytes).sum::<u64>()), line.clone()));
        for (_, leaks) in by_line.into_iter().take(PLACES) {
            let (bytes, blocks, slope) = sums(&leaks);
            let workspaces = &self.story.symptoms.workspaces;
            if self.many_workspaces() && leaks.iter().any(|g| workspaces.stacks.contains(&g.stack)) {
                continue;
            }
            let Some(largest) = leaks.iter().max_by_key(|g| g.bytes).filter(|_| self.matters(bytes)) else { continue };
            findings.push(Finding {
                headline: format!("{} more with each step, {} at the end", size_text(slope), size_text(bytes)),
                evidence: vec![
                    format!(
                        "{} blocks of it stayed, from step {} on: there were more in {} of {} looks at steps' begins",
                        count_text(blocks),
                        largest.first_step,
                        largest.increases,
                        largest.looked
                    ),
                ],
                place: Some((largest.stack, largest.context)),
                mend: "something that outlives the step (a list, a dict, an attribute) holds each of them: keep a number, a CPU copy, or fewer"
                    .to_owned(),
                saves: Some(bytes).filter(|_| self.at_peak(largest.last_seq)),
                ..self.finding(&rules::LEAK, bytes)
            });
        }
        kept
    }

    fn graph_grows(&self, graph: &[Grown], read: &[Grown]) -> Finding {
        let (bytes, blocks, slope) = sums(graph);
        let first = graph.iter().map(|g| g.first_step).min().unwrap_or(0);
        let last = graph.iter().max_by_key(|g| g.last_seq);
        let run = graph.iter().filter(|g| g.bits & Mark::RUN != 0).map(|g| g.bytes).sum::<u64>() * 2 > bytes;
        let backward = self.story.symptoms.graphs.backward;
        let mut evidence = vec![format!(
            "{} blocks that forwards kept for a backward stayed, from step {first} on, of {} places in the forward",
            count_text(blocks),
            graph.len()
        )];
        evidence
            .extend(last.map(|l| format!("the last that each step added: {}", self.doctor.line(l.stack, l.context))));
        if let Some(input) = read.iter().max_by_key(|g| g.bytes) {
            let (bytes, blocks, _) = sums(read);
            evidence.push(format!(
                "with them grew {} in {} blocks that they may have read: {}",
                size_text(bytes),
                count_text(blocks),
                self.doctor.line(input.stack, input.context)
            ));
        }
        let (place, mend) = if run {
            evidence.push("a backward ran through them and left them: retain_graph=True (or create_graph)".to_owned());
            (
                (!backward.is_none()).then_some((backward, ContextId::NONE)),
                "detach() what one step hands to the next, and drop retain_graph=True".to_owned(),
            )
        } else {
            evidence.push("no backward ever ran through them".to_owned());
            (
                last.map(|l| (l.stack, l.context)),
                "what is stored has its graph: store loss.item() or loss.detach(), or compute it under torch.no_grad()"
                    .to_owned(),
            )
        };
        Finding {
            headline: format!(
                "the graphs of earlier iterations are kept: {} more with each step, {} at the end",
                size_text(slope),
                size_text(bytes)
            ),
            evidence,
            place,
            mend,
            saves: last.filter(|l| self.at_peak(l.last_seq)).map(|_| bytes),
            ..self.finding(&rules::GRAPH_KEPT, bytes)
        }
    }

    fn graphs(&self, grow: bool, findings: &mut Vec<Finding>) {
        for (fate, a) in self.story.symptoms.graphs.found() {
            let found = match fate {
                Fate::Kept if !grow => self.graph_collected(&a),
                Fate::Unused if a.times >= 2 => self.eval(&a),
                Fate::Retained if a.times >= 2 && !grow => self.retained(&a),
                _ => continue,
            };
            if self.matters(found.bytes) {
                findings.push(found);
            }
        }
    }

    fn graph_collected(&self, a: &Abandoned) -> Finding {
        let run = a.run && !a.backward.is_none();
        Finding {
            headline: format!(
                "the graphs of {} calls are kept at once, {}, {} each",
                a.calls,
                size_text(a.bytes),
                size_text(a.bytes / a.calls.max(1))
            ),
            evidence: vec![
                format!(
                    "{} blocks that the calls at {} kept",
                    count_text(a.blocks),
                    self.doctor.line(a.site, ContextId::NONE)
                ),
                if run {
                    "a backward ran through them and left them: retain_graph=True (or create_graph)".to_owned()
                } else {
                    format!("no backward ran through them; the last of them: {}", self.doctor.line(a.last.0, a.last.1))
                },
            ],
            place: Some(if run { (a.backward, ContextId::NONE) } else { a.last }),
            mend: if run {
                "detach() what one step hands to the next, and drop retain_graph=True".to_owned()
            } else {
                "what is added up or stored has its graph: use .item() or .detach(), or compute it under torch.no_grad()".to_owned()
            },
            saves: Some(a.bytes - a.bytes / a.calls.max(1)).filter(|_| self.at_peak(a.seqs.1)),
            ..self.finding(&rules::GRAPH_KEPT, a.bytes)
        }
    }

    fn eval(&self, a: &Abandoned) -> Finding {
        Finding {
            headline: format!(
                "{} of activations are kept for a backward that never comes, {} times",
                size_text(a.beside_result),
                count_text(a.times)
            ),
            evidence: vec![format!(
                "{} blocks of a call of the model, made while autograd recorded, fell together with no backward since{}",
                count_text(a.blocks),
                self.dropped_at(a)
            )],
            place: Some((a.site, ContextId::NONE)),
            mend: "call the model there under torch.inference_mode() or torch.no_grad()".to_owned(),
            ..self.finding(&rules::EVAL_WITH_GRAPH, a.beside_result)
        }
    }

    fn retained(&self, a: &Abandoned) -> Finding {
        let place = if a.backward.is_none() { a.last } else { (a.backward, ContextId::NONE) };
        Finding {
            headline: format!("the graph survives its backward, {}, {} times", size_text(a.bytes), count_text(a.times)),
            evidence: vec![
                format!(
                    "{} blocks that the forward kept were there after the backward, and fell together{}",
                    count_text(a.blocks),
                    self.dropped_at(a)
                ),
                format!("the last of them: {}", self.doctor.line(a.last.0, a.last.1)),
            ],
            place: Some(place),
            mend: "the last backward of a graph needs no retain_graph=True (add the losses and call backward once); nothing may hold the \
                   loss longer than the step"
                .to_owned(),
            ..self.finding(&rules::GRAPH_RETAINED, a.bytes)
        }
    }

    fn dropped_at(&self, a: &Abandoned) -> String {
        if a.freed_by.is_none() {
            return String::new();
        }
        format!(", at {}", self.doctor.line(a.freed_by, ContextId::NONE))
    }

    fn gradients(&self) -> Option<Finding> {
        let g = &self.story.symptoms.gradients;
        // At least half of the steps. A loop that is left and entered again begins with gradients once, without an
        // issue.
        if !self.matters(g.bytes) || g.forwards < 2 || g.forwards * 2 < g.chances {
            return None;
        }
        let evidence = format!(
            "{} of {} forwards that followed an optimizer's step began with them",
            count_text(g.forwards),
            count_text(g.chances)
        );
        let saves = self.peak().saturating_sub(g.peak_without);
        let often = g.freed_after();
        let kept = if often.is_some() { g.bytes } else { g.kept() };
        if self.matters(kept) && kept * 2 >= g.bytes {
            let freed = match often {
                Some(steps) => format!("they are freed once in {} steps", count_text(u64::from(steps))),
                None => "nothing frees them".to_owned(),
            };
            return Some(Finding {
                headline: format!("{} of gradients stay from step to step: {freed}", size_text(kept)),
                evidence: vec![evidence, "the next backward adds to what is there".to_owned()],
                place: (!g.backward.is_none()).then_some((g.backward, ContextId::NONE)),
                mend: "call optimizer.zero_grad() after each step; with set_to_none=False it only fills them with zeros, and a model that no \
                       optimizer has (a teacher) needs requires_grad_(False)"
                    .to_owned(),
                saves: Some(saves).filter(|bytes| *bytes > 0),
                ..self.finding(&rules::GRADIENTS_KEPT, kept)
            });
        }
        // If the peak is elsewhere, these gradients cost nothing.
        (self.matters(saves) && g.cleared_late * 2 >= g.bytes).then(|| Finding {
            headline: format!(
                "{} of gradients stay through the next forward and are freed before its backward",
                size_text(g.bytes)
            ),
            evidence: vec![evidence, format!("without them the peak would be {}", size_text(g.peak_without))],
            place: Some((g.cleared_by, ContextId::NONE)),
            mend: "clear them right after the optimizer's step, or before the forward".to_owned(),
            saves: Some(saves),
            ..self.finding(&rules::GRADIENTS_LATE, g.bytes)
        })
    }

    fn garbage(&self) -> Option<Finding> {
        let garbage = &self.story.symptoms.garbage;
        let collected = garbage.collected();
        let (source, _) = collected.first()?;
        if !self.matters(garbage.at_once) {
            return None;
        }
        let mut evidence = vec![format!(
            "{} collections freed {} in {} blocks",
            count_text(garbage.collections),
            size_text(collected.iter().map(|(_, c)| c.bytes).sum()),
            count_text(collected.iter().map(|(_, c)| c.blocks).sum())
        )];
        for ((stack, context), c) in collected.iter().take(PLACES) {
            let seconds = self.gib_seconds(c.byte_ticks);
            evidence.push(format!(
                "{} in {} blocks, {seconds} from allocation to collection: {}",
                size_text(c.bytes),
                count_text(c.blocks),
                self.doctor.line(*stack, *context)
            ));
        }
        // The cycles of the sources named in the evidence come first, in the same order.
        let rank = |held: &HeldByCycle| {
            let (device, stack, context) = held.allocation?;
            let place = collected.iter().position(|(of, _)| *of == (stack, context))?;
            (device == self.story.device).then_some(place)
        };
        let mut cycles: Vec<_> =
            (self.doctor.cycles)().into_iter().filter_map(|held| Some((rank(&held)?, held))).collect();
        cycles.sort_by_key(|(rank, _)| *rank);
        let mut files: Vec<String> = Vec::new();
        let mut told: Vec<Box<str>> = Vec::new();
        for (_, HeldByCycle { file, text, .. }) in cycles {
            if !told.contains(&text) {
                if told.len() < PLACES {
                    let shown = if file.is_empty() { String::new() } else { format!("{file}: ") };
                    evidence.push(format!("the cycle's objects: {shown}{text}"));
                }
                told.push(text);
            }
            if !file.is_empty() && !files.iter().any(|known| **known == *file) {
                files.push(file.into());
            }
        }
        let mend = "break the cycle (weakref, del, no frame or exception in a local)";
        let how = if told.is_empty() { "; memtrace --cycles shows its objects" } else { "" };
        Some(Finding {
            headline: format!("{} were freed only by the garbage collector", size_text(garbage.at_once)),
            evidence,
            place: Some(*source),
            mend: format!("{mend}{how}"),
            files,
            ..self.finding(&rules::CYCLE, garbage.at_once)
        })
    }

    /// Formats bytes times clock ticks as `3.20 GiB·s`.
    fn gib_seconds(&self, byte_ticks: u128) -> String {
        let seconds = byte_ticks as f64 * self.doctor.ns_per_tick / 1e9;
        format!("{}·s", size_text(seconds as u64))
    }

    fn checkpoint(&self) -> Option<Finding> {
        let loaded = &self.story.symptoms.loaded;
        if loaded.kept.is_empty() || !self.matters(loaded.kept.iter().map(|b| b.size).sum()) {
            return None;
        }
        let names = (self.doctor.names)();
        let own = |seq: u64| names.of_alloc(seq).is_some_and(|named| named.kind != TensorKind::Other);
        let kept = loaded.beside_the_model(own);
        let bytes = kept.iter().map(|b| b.size).sum();
        let largest = kept.iter().max_by_key(|b| b.size).filter(|_| self.matters(bytes))?;
        Some(Finding {
            headline: format!("{} of a checkpoint stay beside the model", size_text(bytes)),
            evidence: vec![format!(
                "{} blocks that were read, each as large as one that the model has elsewhere, were there when the training ran",
                count_text(kept.len() as u64)
            )],
            place: Some((largest.stack, largest.context)),
            mend: "del the checkpoint once it is copied, or read it with map_location=\"cpu\" (and mmap=True), or load_state_dict(..., assign=True)"
                .to_owned(),
            saves: Some(bytes).filter(|_| self.at_peak(largest.seq)),
            ..self.finding(&rules::CHECKPOINT_KEPT, bytes)
        })
    }

    fn wrong_device(&self, story: &Story) -> Option<Finding> {
        let symptoms = &self.story.symptoms;
        let (stack, context) = symptoms.loaded.by?;
        let elsewhere =
            story.devices.iter().find(|d| d.device >= 0 && d.device != self.story.device && d.symptoms.computed > 0)?;
        if self.story.device < 0 || symptoms.computed > 0 || symptoms.loaded.most < LEAST {
            return None;
        }
        let bytes = symptoms.loaded.most;
        Some(Finding {
            headline: format!(
                "{} of a checkpoint went to GPU {}, and this process computes on GPU {}",
                size_text(bytes),
                self.story.device,
                elsewhere.device
            ),
            evidence: vec![format!(
                "nothing but loading allocated on GPU {}, where it also made a CUDA context",
                self.story.device
            )],
            place: Some((stack, context)),
            mend: format!(
                "torch.load(..., map_location=\"cuda:{}\") or map_location=\"cpu\": a tensor goes where it was saved",
                elsewhere.device
            ),
            saves: Some(bytes),
            ..self.finding(&rules::WRONG_DEVICE, bytes)
        })
    }

    fn fragmentation(&self) -> Option<Finding> {
        let f = &self.story.symptoms.fragments;
        if f.pinned < PINNED.0
            || f.pinned * PINNED.1 < f.reserved
            || f.pinned * 10 < self.story.peaks.reserved
            || self.story.lane != Lane::Torch
        {
            return None;
        }
        let (source, _) = f.pins.first()?;
        let verb = if f.failed { "could not get" } else { "took" };
        // The peak and an out-of-memory error have their own figures. This is the worst point in time at which
        // fragmentation had an effect.
        let when = match (f.failed, f.at.and_then(|at| at.step)) {
            (true, _) => " when a request failed".to_owned(),
            (false, Some(step)) => format!(" in step {step}"),
            (false, None) => String::new(),
        };
        let mut evidence = vec![format!(
            "the allocator {verb} {} more with that much free in segments of that stream for large blocks: the largest piece was {}, {} segments had \
             live blocks in them",
            size_text(f.wanted),
            size_text(f.largest),
            f.segments
        )];
        for ((stack, context), pin) in f.pins.iter().take(PLACES) {
            evidence.push(format!(
                "{} of it beside {} in {} blocks: {}",
                size_text(pin.pinned),
                size_text(pin.bytes),
                count_text(pin.blocks),
                self.doctor.line(*stack, *context)
            ));
        }
        Some(Finding {
            headline: format!(
                "{} of {} reserved ({}) were free and pinned by live blocks{when}",
                size_text(f.pinned),
                size_text(f.reserved),
                share_text(f.pinned, f.reserved)
            ),
            evidence,
            place: Some(*source),
            mend: "allocate what stays before what comes and goes; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where a replay (next) says that \
                   it helps"
                .to_owned(),
            ..self.finding(&rules::FRAGMENTATION, f.pinned)
        })
    }

    fn buckets(&self) -> Option<Finding> {
        let symptoms = &self.story.symptoms;
        let (buckets, gradients) = (&symptoms.buckets, symptoms.gradients.gradients);
        let bytes = buckets.in_use;
        if !self.matters(bytes) || gradients < bytes / 2 || bytes < gradients / 2 {
            return None;
        }
        Some(Finding {
            headline: format!("buckets of {} beside {} of gradients", size_text(bytes), size_text(gradients)),
            evidence: vec![format!(
                "{} buckets there during the optimizer's step, as much as the gradients themselves",
                buckets.blocks_in_use
            )],
            place: buckets.by,
            mend: "DistributedDataParallel(..., gradient_as_bucket_view=True)".to_owned(),
            saves: Some(bytes.min(gradients)),
            ..self.finding(&rules::BUCKETS, bytes)
        })
    }

    fn many_workspaces(&self) -> bool {
        let w = &self.story.symptoms.workspaces;
        w.most >= 4 && w.streams.len() >= 3 && self.matters(w.bytes)
    }

    fn workspaces(&self) -> Option<Finding> {
        let w = &self.story.symptoms.workspaces;
        if !self.many_workspaces() {
            return None;
        }
        let one = w.bytes / w.most;
        Some(Finding {
            headline: format!("{} cuBLAS workspaces of {}, {} in all", w.most, size_text(one), size_text(w.bytes)),
            evidence: vec![format!(
                "on {} streams: PyTorch keeps one for each handle (thread) and stream, for ever; the latest one's place is named",
                w.streams.len()
            )],
            place: Some(w.latest),
            mend: "use the same few streams and threads again, or CUBLAS_WORKSPACE_CONFIG=:16:8 for smaller ones"
                .to_owned(),
            saves: Some(w.bytes - one),
            ..self.finding(&rules::WORKSPACES, w.bytes)
        })
    }

    fn optimizer_state(&self) -> Option<Finding> {
        let oom =
            self.story.ooms.all().find(|oom| oom.phase == Phase::Optimizer && oom.at.step.is_none_or(|s| s == 0))?;
        let needed = state_needed(self.story, self.doctor.table);
        let there = oom.there.by_category()[memtrace_insight::passes::Category::OptimizerState as usize].bytes;
        if needed.is_some_and(|needed| there >= needed) {
            return None;
        }
        let facts = self.doctor.table.facts(oom.by.0);
        let name = facts.optimizer.map_or("the optimizer", |o| o.name);
        let all = needed.map_or(String::new(), |n| format!(" of the {} it needs", size_text(n)));
        let missing = needed.map_or(oom.wanted, |n| n - there);
        Some(Finding {
            headline: match there {
                0 => format!("{name} makes its state in the first step, and not even the first of it fits"),
                _ => format!(
                    "{name} makes its state in the first step, and it does not fit: {}{all} were there",
                    size_text(there)
                ),
            },
            evidence: vec![format!(
                "forward and backward had reached {}; the error came at {} and wanted {}",
                size_text(self.peak()),
                size_text(oom.there.usage.allocated),
                size_text(oom.wanted)
            )],
            place: Some(oom.by),
            mend: "state in 8 bits or on the CPU, sharded (ZeRO, FSDP), or an optimizer with less; freeing activations does not help here"
                .to_owned(),
            ..self.finding(&rules::STATE_DOES_NOT_FIT, missing)
        })
    }

    fn deferred(&self) -> Option<Finding> {
        let deferred = &self.story.symptoms.deferred;
        let sources = deferred.by_source();
        let ((stack, context, _), _) = sources.first()?;
        if !self.matters(deferred.most) || deferred.most * 10 < self.peak() {
            return None;
        }
        let mut evidence = Vec::new();
        for ((stack, context, stream), by) in sources.iter().take(PLACES) {
            evidence.push(format!(
                "{} blocks of stream {stream:#x}, {} between free and reuse: {}",
                count_text(by.blocks),
                self.gib_seconds(by.byte_ticks),
                self.doctor.line(*stack, *context)
            ));
        }
        Some(Finding {
            headline: format!("{} were free and waited for other streams", size_text(deferred.most)),
            evidence,
            place: Some((*stack, *context)),
            mend: "wait_stream() before the last reference goes, instead of record_stream(); or fewer batches ahead"
                .to_owned(),
            ..self.finding(&rules::DEFERRED, deferred.most)
        })
    }
}

/// The sums of bytes, blocks and growth per step.
fn sums(grown: &[Grown]) -> (u64, u64, u64) {
    (grown.iter().map(|g| g.bytes).sum(), grown.iter().map(|g| g.blocks).sum(), grown.iter().map(Grown::slope).sum())
}
