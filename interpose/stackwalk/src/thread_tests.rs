//! Random programs against a naive model: a stack is a list of texts, and a map from lists gives its id.

use std::cell::Cell;
use std::collections::HashMap;

use memtrace_trace::ids::FrameId;

use super::super::definition::{FrameText, ModuleCall};
use super::super::frame_chain::{CalledModule, IdentifiedFrame};
use super::*;

/// Names and lines, root first.
type Texts = Vec<(String, u32)>;
/// The naive model: the id of each list of texts.
type Model = HashMap<Texts, StackId>;

/// A repeatable random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % limit
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone)]
struct FakeFrame {
    address: usize,
    code: usize,
    instruction: u32,
    /// The object in the first local variable.
    object: usize,
}

/// Functions of these two names call modules.
const CALL: &str = "f0";
const INNER_CALL: &str = "f1";
/// Classes from this address on are no modules.
const FIRST_NO_MODULE: usize = 0x9000;

/// An interpreter with few addresses for frames and code, so that all are reused constantly. Reading a frame that is
/// not on the present stack fails the test.
#[derive(Default)]
struct Machine {
    /// Root first.
    stack: Vec<FakeFrame>,
    /// The name of the code object at each address.
    codes: HashMap<usize, String>,
    generations: HashMap<usize, u32>,
    freed_code_count: usize,
    /// The address of each object's class.
    classes: HashMap<usize, usize>,
    /// Instructions from here on are hidden, unless the frame's address is odd, which is random each time.
    hidden_from: u32,
    resolved: Cell<usize>,
}

impl Machine {
    fn leaf(&self) -> usize {
        self.stack.last().map_or(0, |frame| frame.address)
    }

    fn position(&self, frame: usize) -> usize {
        self.stack.iter().position(|f| f.address == frame).expect("only frames of the present chain are read")
    }

    fn is_hidden(&self, frame: &FakeFrame) -> bool {
        frame.instruction >= self.hidden_from && frame.address & 8 == 0
    }

    fn free_code(&mut self, code: usize) {
        if self.codes.remove(&code).is_some() {
            *self.generations.entry(code).or_default() += 1;
            self.freed_code_count += 1;
        }
    }

    fn expected(&self) -> Texts {
        let shown = self.stack.iter().filter(|frame| !self.is_hidden(frame));
        shown.map(|frame| (self.codes[&frame.code].clone(), frame.instruction)).collect()
    }

    /// The objects and classes of the modules being called, outermost first.
    fn module_calls(&self) -> Vec<(usize, usize)> {
        let mut outer = false;
        let mut calls = Vec::new();
        for frame in self.stack.iter().filter(|frame| !self.is_hidden(frame)) {
            let name = &*self.codes[&frame.code];
            let class = self.classes.get(&frame.object).copied().unwrap_or(FIRST_NO_MODULE);
            if (name == CALL || name == INNER_CALL && !outer) && class < FIRST_NO_MODULE {
                calls.push((frame.object, class));
            }
            outer = name == CALL;
        }
        calls
    }
}

impl FrameReader for &Machine {
    unsafe fn read(self, frame: usize) -> RawFrame {
        let at = self.position(frame);
        let previous = at.checked_sub(1).map_or(0, |below| self.stack[below].address);
        RawFrame { code: self.stack[at].code, instruction: self.stack[at].instruction, previous }
    }
}

impl FrameChain for Machine {
    type Reader<'a> = &'a Machine;

    fn reader(&self) -> &Machine {
        self
    }

    fn freed_code_count(&self) -> usize {
        self.freed_code_count
    }

    fn generation(&self, code: usize) -> u32 {
        self.generations.get(&code).copied().unwrap_or(0)
    }

    unsafe fn identify(
        &self,
        frame: usize,
        raw: RawFrame,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> IdentifiedFrame {
        let found = &self.stack[self.position(frame)];
        assert_eq!((found.code, found.instruction), (raw.code, raw.instruction));
        self.resolved.set(self.resolved.get() + 1);
        let is_cacheable = raw.instruction < self.hidden_from;
        if self.is_hidden(found) {
            return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable };
        }
        let name = &self.codes[&raw.code];
        let text = FrameText { name, qualname: name, filename: "f.py", line: raw.instruction, first_line: 1 };
        let meaning = FrameMeaning::frame(interner.frame(&text, sink));
        let calls = name == CALL || name == INNER_CALL;
        IdentifiedFrame {
            meaning: if calls { meaning.as_module_call(name == INNER_CALL) } else { meaning },
            is_cacheable,
        }
    }

    unsafe fn first_local(&self, frame: usize) -> usize {
        let frame = &self.stack[self.position(frame)];
        let name = &*self.codes[&frame.code];
        assert!(name == CALL || name == INNER_CALL, "only frames of calls are asked");
        frame.object
    }

    unsafe fn class(&self, object: usize) -> usize {
        self.classes.get(&object).copied().unwrap_or(FIRST_NO_MODULE)
    }

    unsafe fn called(
        &self,
        object: usize,
        caller: ContextId,
        next: &mut u32,
        sink: &mut dyn DefinitionSink,
    ) -> CalledModule {
        let class = self.classes.get(&object).copied().unwrap_or(FIRST_NO_MODULE);
        if class >= FIRST_NO_MODULE {
            return CalledModule { class, context: caller };
        }
        let call = ModuleCall { caller, object, class };
        CalledModule { class, context: sink.find_call(call, next).unwrap_or_else(|| sink.add_call(call, "C")) }
    }
}

/// Rebuilds stacks from definitions.
#[derive(Default)]
struct Tree {
    frames: HashMap<FrameId, (String, u32)>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
    calls: HashMap<(ContextId, usize, usize), ContextId>,
    lost: Vec<Loss>,
}

impl DefinitionSink for Tree {
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>) {
        assert_eq!(self.frames.insert(id, (text.name.to_owned(), text.line)), None);
    }

    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId) {
        assert_eq!(self.stacks.insert(id, (parent, frame)), None);
    }

    fn find_call(&mut self, call: ModuleCall, _next: &mut u32) -> Option<ContextId> {
        self.calls.get(&(call.caller, call.object, call.class)).copied()
    }

    fn add_call(&mut self, call: ModuleCall, _class: &str) -> ContextId {
        let id = ContextId(self.calls.len() as u32 + 1);
        assert_eq!(self.calls.insert((call.caller, call.object, call.class), id), None);
        id
    }

    fn lost(&mut self, what: Loss) {
        self.lost.push(what);
    }
}

impl Tree {
    fn stack_of(&self, mut id: StackId) -> Texts {
        let mut frames = Vec::new();
        while !id.is_none() {
            let (parent, frame) = self.stacks[&id];
            frames.push(self.frames[&frame].clone());
            id = parent;
        }
        frames.reverse();
        frames
    }

    /// The objects and classes of a call and its callers, outermost first.
    fn calls_of(&self, mut id: ContextId) -> Vec<(usize, usize)> {
        let mut calls = Vec::new();
        while !id.is_none() {
            let ((caller, object, class), _) = self.calls.iter().find(|(_, known)| **known == id).unwrap();
            calls.push((*object, *class));
            id = *caller;
        }
        calls.reverse();
        calls
    }
}

fn capture(machine: &Machine, thread: &mut ThreadStacks, interner: &Interner, tree: &mut Tree) -> StackId {
    // SAFETY: the fake machine's leaf is the innermost frame of its present chain.
    unsafe { thread.capture(machine, machine.leaf(), interner, tree) }
}

/// One step of a random program.
fn random_step(machine: &mut Machine, random: &mut Random, deepest: usize) {
    let address = |machine: &Machine, random: &mut Random| {
        // Usually the address that a stack of frames would have, sometimes any address, as for generators.
        let usual = 0x1000 + machine.stack.len() * 8;
        let candidate = if random.one_in(4) { 0x9000 + random.below(40) * 8 } else { usual };
        let taken = |address| machine.stack.iter().any(|frame| frame.address == address);
        [candidate, usual].into_iter().find(|address| !taken(*address)).unwrap_or(0x20000 + machine.stack.len() * 8)
    };
    match random.below(10) {
        0..=3 if machine.stack.len() < deepest => {
            let code = 0x5000 + random.below(6) * 16;
            let name = format!("f{}", random.below(4));
            machine.codes.entry(code).or_insert(name);
            let object = 0x100 + random.below(5) * 16;
            let (address, instruction) = (address(machine, random), random.below(4) as u32);
            let frame = FakeFrame { address, code, instruction, object };
            machine.stack.push(frame);
        }
        4..=6 => {
            machine.stack.pop();
        }
        7 => {
            for _ in 0..random.below(deepest) {
                machine.stack.pop();
            }
        }
        8 => {
            let code = 0x5000 + random.below(6) * 16;
            if machine.stack.iter().all(|frame| frame.code != code) {
                machine.free_code(code);
            }
        }
        _ => {}
    }
    if let Some(leaf) = machine.stack.last_mut()
        && random.one_in(2)
    {
        leaf.instruction = random.below(4) as u32;
    }
    // Another object replaces one. Its class may be the same or not, a module's or not.
    let object = 0x100 + random.below(5) * 16;
    if random.one_in(8) {
        machine.classes.insert(object, [0x8000, 0x8010, 0x9000][random.below(3)]);
    }
    // A function is called again from the same line, with another object.
    let at = random.below(machine.stack.len().max(1));
    if let Some(frame) = machine.stack.get_mut(at)
        && random.one_in(4)
    {
        frame.object = object;
    }
}

#[test]
fn random_programs_match_the_naive_model() {
    let mut module_calls = [0; 4];
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut interner = Interner::new();
        let mut thread = ThreadStacks::new();
        let mut tree = Tree::default();
        let mut model: Model = HashMap::from([(vec![], StackId::NONE)]);
        let mut machine = Machine { hidden_from: if seed % 3 == 0 { 3 } else { u32::MAX }, ..Machine::default() };
        let deepest = [3, 12, 40][seed as usize % 3];
        for step in 0..2500 {
            random_step(&mut machine, &mut random, deepest);
            if random.one_in(3) {
                continue;
            }
            let id = capture(&machine, &mut thread, &interner, &mut tree);
            let expected = machine.expected();
            assert_eq!(tree.stack_of(id), expected, "seed {seed}, step {step}");
            assert_eq!(*model.entry(expected).or_insert(id), id, "seed {seed}, step {step}: one stack, two ids");
            // Not after every capture, so that the cached calls may be older than the cached frames.
            if !id.is_none() && random.one_in(2) {
                // SAFETY: the machine has not changed since the capture.
                let call = unsafe { thread.module_call(&machine, &mut tree) };
                let calls = machine.module_calls();
                module_calls[calls.len().min(3)] += 1;
                assert_eq!(tree.calls_of(call), calls, "seed {seed}, step {step}");
            }
            if random.one_in(1000) {
                interner = Interner::new();
                tree = Tree::default();
                model = HashMap::from([(vec![], StackId::NONE)]);
            }
        }
        assert_eq!(interner.counts().0 as usize, tree.stacks.len());
        thread.release();
    }
    assert!(
        module_calls.iter().all(|n| *n > 1000),
        "too few stacks with none, one, two and more calls: {module_calls:?}"
    );
}

#[test]
fn a_known_stack_is_not_resolved_again() {
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
    for n in 0..30 {
        machine.codes.insert(0x5000 + n, format!("f{n}"));
        machine.stack.push(FakeFrame { address: 0x1000 + n * 8, code: 0x5000 + n, instruction: 1, object: 0 });
    }
    let id = capture(&machine, &mut thread, &interner, &mut tree);
    assert_eq!(machine.resolved.get(), 30);
    assert_eq!(capture(&machine, &mut thread, &interner, &mut tree), id);
    // Another code object is freed. None of the stack's frames is looked up again.
    machine.codes.insert(0x9000, "other".into());
    machine.free_code(0x9000);
    assert_eq!(capture(&machine, &mut thread, &interner, &mut tree), id);
    machine.stack.pop();
    assert_ne!(capture(&machine, &mut thread, &interner, &mut tree), id);
    assert_eq!(machine.resolved.get(), 30);
    // A thread with an empty cache finds the frames in the key cache.
    let mut other = ThreadStacks::new();
    capture(&machine, &mut other, &interner, &mut tree);
    assert_eq!(machine.resolved.get(), 30);
    thread.release();
    other.release();
}

/// Blocks that share a module, as compiled blocks share their graph. Each block also allocates by itself.
#[test]
fn a_shared_module_has_the_caller_that_calls_it_now() {
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
    machine.codes.insert(0x5000, CALL.into());
    machine.classes.extend([(0xb0, 1), (0xb1, 1), (0xc0, 2)]);
    let call = |at: usize, object| FakeFrame { address: 0x1000 + at * 8, code: 0x5000, instruction: 1, object };
    for block in [0xb0, 0xb1, 0xb0] {
        for deep in [false, true] {
            machine.stack = vec![call(0, block), call(1, 0xc0)];
            machine.stack.truncate(if deep { 2 } else { 1 });
            capture(&machine, &mut thread, &interner, &mut tree);
            // SAFETY: the last capture was of this stack.
            let innermost = unsafe { thread.module_call(&machine, &mut tree) };
            assert_eq!(tree.calls_of(innermost), machine.module_calls());
        }
    }
    thread.release();
}

#[test]
fn fresh_code_with_the_same_text_does_not_grow_the_tables() {
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
    for n in 0..100_000 {
        let code = 0x10_0000 + n * 16;
        machine.codes.insert(code, "lambda".into());
        machine.stack = vec![FakeFrame { address: 0x1000, code, instruction: 7, object: 0 }];
        capture(&machine, &mut thread, &interner, &mut tree);
    }
    let (stacks, frames, evicted) = interner.counts();
    assert_eq!((stacks, frames), (1, 1));
    assert!(evicted > 0);
    thread.release();
}

#[test]
fn an_endless_chain_is_truncated_and_counted() {
    #[derive(Clone, Copy)]
    struct Endless;
    impl FrameReader for Endless {
        unsafe fn read(self, frame: usize) -> RawFrame {
            RawFrame { code: 0x5000, instruction: 0, previous: frame + 8 }
        }
    }
    impl FrameChain for Endless {
        type Reader<'a> = Endless;
        fn reader(&self) -> Endless {
            Endless
        }
        fn freed_code_count(&self) -> usize {
            0
        }
        fn generation(&self, _code: usize) -> u32 {
            0
        }
        unsafe fn identify(
            &self,
            _frame: usize,
            _raw: RawFrame,
            interner: &Interner,
            sink: &mut dyn DefinitionSink,
        ) -> IdentifiedFrame {
            let text = FrameText { name: "f", qualname: "f", filename: "f.py", line: 1, first_line: 1 };
            IdentifiedFrame { meaning: FrameMeaning::frame(interner.frame(&text, sink)), is_cacheable: true }
        }
        unsafe fn first_local(&self, _frame: usize) -> usize {
            0
        }
        unsafe fn class(&self, _object: usize) -> usize {
            0
        }
        unsafe fn called(
            &self,
            _object: usize,
            caller: ContextId,
            _next: &mut u32,
            _sink: &mut dyn DefinitionSink,
        ) -> CalledModule {
            CalledModule { class: 0, context: caller }
        }
    }
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    for round in 1..=2 {
        // SAFETY: the fake chain reads no memory.
        let id = unsafe { thread.capture(&Endless, 0x1000, &interner, &mut tree) };
        assert_eq!(tree.stack_of(id).len(), MAX_DEPTH);
        assert_eq!(tree.lost, vec![Loss::Depth; round]);
    }
    thread.release();
}

#[test]
fn threads_share_one_tree() {
    let interner = Interner::new();
    let results: Vec<(Tree, Model)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                let interner = &interner;
                scope.spawn(move || {
                    let mut random = Random(seed % 2);
                    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
                    let mut model = HashMap::new();
                    // All threads have the same code at the same addresses, and none of it is freed.
                    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
                    for n in 0..6 {
                        machine.codes.insert(0x5000 + n * 16, format!("f{n}"));
                    }
                    for _ in 0..6000 {
                        random_step(&mut machine, &mut random, 12);
                        for n in 0..6 {
                            machine.codes.insert(0x5000 + n * 16, format!("f{n}"));
                        }
                        machine.freed_code_count = 0;
                        machine.generations.clear();
                        let id = capture(&machine, &mut thread, interner, &mut tree);
                        assert_eq!(*model.entry(machine.expected()).or_insert(id), id);
                    }
                    thread.release();
                    (tree, model)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Each definition was delivered to exactly one thread, and all threads agree on the ids.
    let (mut all, mut ids) = (Tree::default(), HashMap::new());
    for (tree, model) in results {
        for (id, frame) in tree.frames {
            assert_eq!(all.frames.insert(id, frame), None);
        }
        for (id, stack) in tree.stacks {
            assert_eq!(all.stacks.insert(id, stack), None);
        }
        for (stack, id) in model {
            assert_eq!(*ids.entry(stack).or_insert(id), id);
        }
    }
    for (stack, id) in ids {
        assert_eq!(all.stack_of(id), stack);
    }
}

/// A prediction that fails half-way has rewritten entries. The next attempt may find no further change among them.
#[test]
fn entries_that_a_wrong_guess_rewrote_are_interned() {
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
    for n in 0..8 {
        machine.codes.insert(0x5000 + n * 16, format!("f{n}"));
    }
    let frame = |address: usize, instruction| FakeFrame {
        address: 0x1000 + address * 8,
        code: 0x5000 + address % 8 * 16,
        instruction,
        object: 0,
    };
    let programs: [&[(usize, u32)]; 6] = [
        &[(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)],
        // The same leaf and callers, two of them at other addresses, and then another root.
        &[(9, 0), (1, 0), (2, 1), (3, 0), (4, 1), (5, 0)],
        &[(0, 0), (2, 0), (3, 1), (4, 1), (5, 0)],
        &[(0, 0), (1, 0), (2, 1), (3, 0), (4, 1), (6, 0), (5, 1)],
        &[(1, 0), (2, 1), (3, 0), (4, 1), (5, 0)],
        &[(4, 0), (5, 0)],
    ];
    let mut random = Random(5);
    for _ in 0..500 {
        let program = programs[random.below(programs.len())];
        machine.stack = program.iter().map(|(address, instruction)| frame(*address, *instruction)).collect();
        let id = capture(&machine, &mut thread, &interner, &mut tree);
        assert_eq!(tree.stack_of(id), machine.expected());
    }
    thread.release();
}

/// The caller catches a panic of the sink. Later captures must not use the incomplete state.
#[test]
fn a_panic_in_the_sink_leaves_a_valid_state() {
    struct Panics;
    impl DefinitionSink for Panics {
        fn frame(&mut self, _id: FrameId, _text: &FrameText<'_>) {}
        fn stack(&mut self, _id: StackId, _parent: StackId, _frame: FrameId) {
            panic!("on purpose");
        }
    }
    let interner = Interner::new();
    let (mut thread, mut tree) = (ThreadStacks::new(), Tree::default());
    let mut machine = Machine { hidden_from: u32::MAX, ..Machine::default() };
    machine.codes.insert(0x5000, "f".into());
    for n in 0..5 {
        machine.stack.push(FakeFrame { address: 0x1000 + n * 8, code: 0x5000, instruction: 1, object: 0 });
    }
    let before = capture(&machine, &mut thread, &interner, &mut tree);
    machine.stack[2].instruction = 2;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: the fake machine's leaf is the innermost frame of its present chain.
        unsafe { thread.capture(&machine, machine.leaf(), &interner, &mut Panics) }
    }));
    assert!(panicked.is_err());
    // The first of the three new stacks was defined to the sink that panicked.
    let lost = StackId(before.0 + 1);
    tree.frames.insert(FrameId(2), ("f".into(), 2));
    tree.stacks.insert(lost, (tree.stacks[&StackId(before.0 - 2)].0, FrameId(2)));
    let id = capture(&machine, &mut thread, &interner, &mut tree);
    assert_eq!(tree.stack_of(id), machine.expected());
    thread.release();
}
