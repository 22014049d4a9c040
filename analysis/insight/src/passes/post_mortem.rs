//! A second look at a recording, where the first one found something to explain: what the reserved memory was at a moment, and what
//! other settings of the allocator would have done.

use memtrace_trace::event::Event;

use super::fragmentation::Reserved;
use super::what_if::{PolicyReplay, Question, WhatIf};
use memtrace_input::{Recording, Survey};
use memtrace_replay::Replay;

/// Origins named that pin memory.
const PINS: usize = 10;
/// Blocks named that are as large as a request that failed.
const SAME_SIZE: usize = 2;

/// What is to be found out about a device.
#[derive(Clone, Debug)]
pub struct Inquest {
    /// The device.
    pub device: i16,
    /// The event after which the moment is looked at.
    pub at: u64,
    /// A size (rounded) whose like are looked for among what is alive then.
    pub size: Option<u64>,
    /// What other settings would have done, where that is to be replayed.
    pub question: Option<Question>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct PostMortem {
    /// The device.
    pub device: i16,
    /// What was reserved at the moment.
    pub reserved: Reserved,
    /// Live blocks of the size, by the `seq` of their allocation: two at most.
    pub same_size: Vec<u64>,
    /// Where `size` was asked for: all live blocks, as `seq` of their allocation and their size, in order.
    pub live: Vec<(u64, u64)>,
    /// What other settings would have done.
    pub what_if: Option<WhatIf>,
}

struct Case {
    inquest: Inquest,
    replay: Option<Replay>,
    policy: Option<PolicyReplay>,
    found: PostMortem,
}

impl PostMortem {
    /// Streams a recording once for all inquests.
    pub fn of(
        recording: &dyn Recording,
        survey: &Survey,
        inquests: Vec<Inquest>,
        progress: &mut dyn FnMut(u64),
    ) -> Vec<PostMortem> {
        let mut cases: Vec<Case> = inquests.into_iter().map(|inquest| Case::new(inquest, survey)).collect();
        if cases.is_empty() {
            return Vec::new();
        }
        let mut done = 0;
        recording.stream(&mut |events: &[Event]| {
            cases.iter_mut().for_each(|case| case.take(events));
            done += events.len() as u64;
            progress(done);
        });
        cases.into_iter().map(Case::finish).collect()
    }
}

impl Case {
    fn new(inquest: Inquest, survey: &Survey) -> Case {
        let device = inquest.device;
        let found = PostMortem {
            device,
            reserved: Reserved::default(),
            same_size: Vec::new(),
            live: Vec::new(),
            what_if: None,
        };
        let policy = inquest.question.clone().map(PolicyReplay::new);
        Case { replay: Some(Replay::new(survey, Some(device))), policy, found, inquest }
    }

    fn take(&mut self, events: &[Event]) {
        if let Some(replay) = &mut self.replay {
            let until = events.partition_point(|e| e.seq <= self.inquest.at);
            events.iter().take(until).for_each(|e| replay.apply(e, |_, _, _, _| {}));
            if until < events.len() {
                self.look();
            }
        }
        if let Some(policy) = &mut self.policy {
            events.iter().for_each(|e| policy.take(e));
        }
    }

    fn look(&mut self) {
        let Some(replay) = self.replay.take() else { return };
        let Some(device) = replay.devices().first() else { return };
        self.found.reserved = Reserved::of(&device.allocator, PINS);
        if let Some(size) = self.inquest.size {
            let same = device.allocator.allocated().filter(|(_, block)| block.size == size).map(|(_, block)| block.seq);
            self.found.same_size = same.take(SAME_SIZE).collect();
            self.found.live = device.allocator.allocated().map(|(_, block)| (block.seq, block.size)).collect();
            self.found.live.sort_unstable();
        }
    }

    fn finish(mut self) -> PostMortem {
        self.look();
        self.found.what_if = self.policy.map(PolicyReplay::finish);
        self.found
    }
}
