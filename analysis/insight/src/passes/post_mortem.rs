//! A second pass over a recording, for points in time that the first pass left to explain. It divides the reserved
//! memory at that point, and replays other allocator settings.

use memtrace_trace::event::Event;

use super::fragmentation::Reserved;
use super::what_if::{PolicyReplay, Question, WhatIf};
use memtrace_input::{Recording, Survey};
use memtrace_replay::Replay;

/// The maximum number of origins to list that block segments.
const PINS: usize = 10;
/// The maximum number of blocks to list that are as large as a failed request.
const SAME_SIZE: usize = 2;

/// One query about a device.
#[derive(Clone, Debug)]
pub struct Inquest {
    /// The device ordinal.
    pub device: i16,
    /// `seq` of the last event before the point in time.
    pub at: u64,
    /// The rounded size in bytes of the allocated blocks to look for; `None` to look for none.
    pub size: Option<u64>,
    /// Other allocator settings to replay; `None` to replay none.
    pub question: Option<Question>,
}

/// The answer to one query.
#[derive(Clone, Debug)]
pub struct PostMortem {
    /// The device ordinal.
    pub device: i16,
    /// The reserved memory at the point in time.
    pub reserved: Reserved,
    /// Blocks of the requested size, by the `seq` of their allocation. At most two.
    pub same_size: Vec<u64>,
    /// All allocated blocks as the `seq` of their allocation and their bytes, in order. Empty without
    /// [`Inquest::size`].
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
    /// Streams a recording once and answers all queries, in their order. `progress` receives the number of events read
    /// so far.
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
