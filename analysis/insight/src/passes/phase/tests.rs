//! Phases and steps of programs that are written as one letter per allocation.

use super::*;
use memtrace_input::MemoryRecording;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::Source;
use memtrace_trace::file::{Context, Frame, Label, StackNode};
use memtrace_trace::ids::ContextId;

/// The stacks of the test programs: user code, then the library's function that it calls.
const STACKS: [(u32, &str, &str); 10] = [
    (1, "", ""),
    (10, "/torch/nn/modules/module.py", "_call_impl"),
    (20, "/torch/nn/modules/module.py", "_call_impl"),
    (30, "/torch/nn/modules/module.py", "_call_impl"),
    (40, "/torch/nn/functional.py", "cross_entropy"),
    (50, "/torch/optim/adam.py", "_init_group"),
    (60, "/torch/optim/optimizer.py", "zero_grad"),
    (70, "/torch/nn/functional.py", "cross_entropy"),
    (80, "/torch/optim/lbfgs.py", "step"),
    (90, "", ""),
];
const PLAIN: usize = 0;
const TRAINED: usize = 1;
const EVALUATED: usize = 2;
const DROPPED: usize = 3;
const LOSS: usize = 4;
const OPTIMIZER: usize = 5;
const CLEARING: usize = 6;
const DROPPED_LOSS: usize = 7;
/// A function that the trained model calls.
const INSIDE: usize = 10;
const STEP: usize = 8;
const ELSEWHERE: usize = 9;
/// A closure that the optimizer's step calls.
const CLOSURE: usize = 11;

/// Records a program of one letter per allocation. `f`: in a model's call, followed by a backward pass. `n`: the same
/// without gradients. `e`: in a call without gradients at another place. `c`: the same with gradients, a weight that
/// autocast casts. `v`: in a call with gradients at a third place
/// that no backward pass follows. `m`: the loss of that. `l`: the loss. `b`: in a backward pass. `o`: in an optimizer's
/// step. `h`: the same inside a backward pass. `z`: a free while gradients are cleared. `d`: user code. `x`: user code
/// without gradients. `y`: user code at another line.
/// `k`: a closure's code, without gradients. `(` and `)`: an optimizer's step that calls a closure. `!`: user code that
/// runs out of memory.
fn record(program: &str) -> MemoryRecording {
    let mut recording = MemoryRecording::default();
    let definitions = &mut recording.definitions;
    definitions.frames.push(Frame::default());
    definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId::NONE });
    for (line, filename, name) in STACKS {
        let user = Frame { filename: "train.py".into(), name: "main".into(), line, ..Frame::default() };
        let library = Frame { filename: filename.into(), name: name.into(), ..Frame::default() };
        for frame in [user, library] {
            let id = FrameId(definitions.frames.len() as u32);
            let parent = if frame.line > 0 { StackId::NONE } else { StackId(definitions.stacks.len() as u32 - 1) };
            definitions.frames.push(frame);
            definitions.stacks.push(StackNode { parent, frame: id });
        }
    }
    let stack = |index: usize| StackId(2 * index as u32 + 2);
    for parent in [StackId::NONE, stack(TRAINED), StackId::NONE, stack(STEP)] {
        definitions.stacks.push(StackNode { parent, frame: FrameId(1) });
    }
    let node = |at| Context { node: "N".into(), forward: stack(at), ..Context::default() };
    definitions.contexts = vec![Context::default(), node(TRAINED), node(LOSS)];
    let label = Label { origin: LabelOrigin::RecordFunction, text: "Optimizer.step#Adam.step".into() };
    definitions.labels.insert(1, label);
    let (on, off) = (Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED), Flags::GRAD_KNOWN);
    let in_backward = Flags::IN_BACKWARD.with(off);
    for letter in program.chars().filter(|letter| *letter != ' ') {
        let (at, flags) = match letter {
            '(' | ')' => (STEP, off),
            'f' => (TRAINED, on),
            'n' => (INSIDE, off),
            'e' => (EVALUATED, off),
            'c' => (EVALUATED, on),
            'v' => (DROPPED, on),
            'l' => (LOSS, on),
            'm' => (DROPPED_LOSS, on),
            'b' => (PLAIN, in_backward),
            'o' => (OPTIMIZER, off),
            'h' => (OPTIMIZER, in_backward),
            'z' => (CLEARING, on),
            'd' | '!' => (PLAIN, on),
            'x' => (PLAIN, off),
            'y' => (ELSEWHERE, on),
            'k' => (CLOSURE, off),
            _ => panic!("{letter}"),
        };
        let action = match letter {
            'z' => Action::FreeRequested,
            '!' => Action::Oom,
            _ => Action::Alloc,
        };
        let mut add = |source, action, addr, stack| {
            let seq = recording.events.len() as u64 + 1;
            let event = Event { seq, source, action, addr, stack, flags, thread: ThreadId(1), ..Event::EMPTY };
            let context = if letter == 'b' { ContextId(1) } else { ContextId::NONE };
            recording.events.push(Event { context, ..event });
        };
        if at == OPTIMIZER || letter == '(' {
            add(Source::Label, Action::RangeStart, 1, stack(at));
        }
        if at != STEP {
            add(Source::Torch, action, 0, if letter == 'b' { StackId::NONE } else { stack(at) });
        }
        if at == OPTIMIZER || letter == ')' {
            add(Source::Label, Action::RangeEnd, 1, StackId::NONE);
        }
    }
    recording
}

/// The first letter of each event's phase, `.` for other, with a `|` where a step begins. And the tracker.
fn phases(program: &str) -> (String, PhaseTracker) {
    let recording = record(program);
    let mut tracker = PhaseTracker::of(&recording);
    let (mut text, mut step) = (String::new(), None);
    for e in &recording.events {
        if e.source == Source::Label {
            tracker.observe_label(e);
            continue;
        }
        let phase = tracker.observe(e).phase;
        if tracker.now().step != step {
            step = tracker.now().step;
            text.push('|');
        }
        text.push_str(if phase == Phase::Other { "." } else { &phase.name()[..1] });
    }
    (text, tracker)
}

#[test]
fn phases_and_steps_of_programs() {
    let cases = [
        ("a plain loop", "xdflbo dflbo", "l|dffbo|dffbo"),
        ("one step", "dflbo", "l|ffbo"),
        ("gradients are cleared after the step", "flboz dflboz", "|ffboo|dffboo"),
        ("gradients are cleared between forward and backward", "flzbo flzbo", "|fffbo|fffbo"),
        ("part of a forward pass has no gradients", "fnflbo fnlbo", "|ffffbo|fffbo"),
        ("a forward pass begins without gradients", "nflbo nnflbo", "|fffbo|ffffbo"),
        ("evaluation after a step", "flbo exee flbo", "|ffboeeee|ffbo"),
        ("evaluation before the training", "dee dflbo", "leee|ffbo"),
        ("evaluation after the training, with batches", "flbo flbo dedee", "|ffbo|ffbodeeee"),
        ("evaluation with gradients", "flbo dvmvm flbo dvmvm", "|ffbo|deeeeffbodeeee"),
        ("such an evaluation loads its own batches", "dflbo dflbo yvmyvm dflbo yvm", "|dffbo|dffbodeeeee|dffbodee"),
        ("a second stage fails in its first forward pass", "dflbo dflbo yv!", "|dffbo|dffbo|dff"),
        ("the first forward pass fails before its backward pass", "dfl!", "l|fff"),
        ("a forward pass at a new place fails", "flbo v!", "|ffbo|ff"),
        ("evaluation under autocast", "flbo ceece flbo ce", "|ffboeeeee|ffboee"),
        ("evaluation under autocast before the training", "ce dflbo ce", "eee|ffboee"),
        ("batches after an evaluation", "flbo dflbo e dflbo", "|ffbo|dffboe|dffbo"),
        ("a teacher between forward and backward", "fezlbo fexlbo", "|feffbo|feefbo"),
        ("optimizers inside a backward pass", "fl bhbhb fl bhbhb", "|ffbobob|ffbobob"),
        ("batches after such a backward pass", "dfl bhb xdfl bhb", "|dffbob.|dffbob"),
        ("user code without gradients after the step", "flbo xx flbo xd flbo", "|ffbo..|ffbo.|dffbo"),
        ("user code without gradients before the step", "flbxo flbxo", "|ffboo|ffboo"),
        ("a closure's code before and after its backward pass", "flkbk flkbko", "|fffbofffboo"),
        ("a backward pass fails", "flbo fl!", "|ffbo|fff"),
    ];
    for (what, program, expected) in cases {
        assert_eq!(phases(program).0, expected, "{what}: {program}");
    }
}

#[test]
fn optimizers_inside_a_backward_pass_do_not_end_it() {
    let (_, tracker) = phases("fl bhbhb fl bhbhb fl");
    assert_eq!((tracker.now().backward_passes, tracker.now().optimizer_steps), (2, 2));
    assert_eq!(tracker.ended_steps(), 2);
}

#[test]
fn micro_batches_are_counted() {
    let cases = [
        ("flbo", 1),
        ("flb flb flb", 3),
        ("flb flbo flb", 1),
        ("flbbb", 1),
        ("flb lb lb", 1),
        ("vlb", 1),
        ("flb (flb)", 2),
        ("(flb flb)", 1),
    ];
    for (program, expected) in cases {
        assert_eq!(phases(program).1.micro_batches(), expected, "{program}");
    }
}

/// The number of the last request of a program that only calls models. Capital letters are events of a second thread.
fn last_request(program: &str) -> Option<u32> {
    let mut recording = record(&program.to_lowercase());
    let definitions = &mut recording.definitions;
    definitions.contexts.truncate(1);
    definitions.labels.clear();
    definitions.frames.iter_mut().filter(|f| f.filename.contains("/optim/")).for_each(|f| f.filename = "".into());
    let letters = program.chars().filter(|letter| *letter != ' ');
    for (e, _) in recording.events.iter_mut().zip(letters).filter(|(_, letter)| letter.is_uppercase()) {
        e.thread = ThreadId(2);
    }
    let mut tracker = PhaseTracker::of(&recording);
    for e in &recording.events {
        tracker.observe(e);
    }
    tracker.now().step
}

#[test]
fn the_order_of_threads_begins_no_requests() {
    let expected = last_request("dnnn dnnn");
    assert!(expected.is_some());
    for program in ["dnDEnDEn dnnDE", "dnDEDEnn DEdnDEnn", "dnn DEDE n dnnn"] {
        assert_eq!(last_request(program), expected, "{program}");
    }
    assert_ne!(last_request("dn dn dn"), expected);
}
