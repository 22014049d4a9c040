//! Replays the allocator's policy: whether it reproduces the recording, and what other allocator settings would have
//! done.
//!
//! A [`Policy`] with the run's own settings receives the recorded requests and frees. Its CUDA answers as the recorded
//! CUDA did. The policy must make the recorded segments and hand out the recorded addresses, one by one. At the first
//! difference the replay stops, and the result makes no claim about the run. PyTorch versions differ in which of two
//! equal blocks they take: the one at the lower address, or the one whose segment is older. Both orders are tried.
//!
//! Policies with other settings receive the same requests, on a device with as much memory as the allocator had. Facts
//! that the replay cannot know stay as recorded: the memory of other libraries and processes, and when streams were
//! done with a block. If an earlier iteration shows the rest of an interrupted step, a setting under which the failed
//! request fits receives that rest as well.

use std::collections::{BTreeMap, VecDeque};

use memtrace_trace::event::{Action, Event, Flags, Source};

use super::rest_of_step::{RestBlock, RestEvent, RestOfStep};
use crate::rules::{CandidateSetting, candidate_settings};
use memtrace_input::AddressBuildHasher;
use memtrace_replay::{AllocatorSettings, LimitedDevice, Policy, PolicyDevice};

type Addresses = std::collections::HashMap<u64, u64, AddressBuildHasher>;

/// How far the policy reproduced the recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Agreement {
    /// The number of blocks that got the recorded address.
    pub blocks: u64,
    /// The number of segment events that were reproduced one for one.
    pub segments: u64,
    /// The first difference: the `seq` of its event (0 at the end of the recording), and a description.
    pub difference: Option<(u64, String)>,
    /// The highest number of reserved bytes in the replay.
    pub peak_reserved: u64,
}

/// The outcome of one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SettingOutcome {
    /// The setting.
    pub setting: &'static CandidateSetting,
    /// Whether the failed request would have succeeded. `None` if no request failed, or if the answer depends on where
    /// CUDA places segments.
    pub fits: Option<bool>,
    /// `seq` of an earlier event at which the setting would have run out of memory.
    pub fails_earlier: Option<u64>,
    /// The highest number of reserved bytes. Counts up to the out-of-memory error where there was one.
    pub peak_reserved: u64,
    /// Reserved bytes at the end, or at the failed request.
    pub reserved: u64,
    /// The rest of the interrupted step. `None` if the failed request does not fit, or if the rest is unknown.
    pub step: Option<StepOutcome>,
}

/// The outcome of one setting for the rest of an interrupted step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepOutcome {
    /// The bytes that the device lacks for the rest of the step; 0 if the step fits.
    pub short: u64,
    /// The highest number of reserved bytes.
    pub peak_reserved: u64,
}

/// The result of the replay.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WhatIf {
    /// Whether the replay reproduces the recording.
    pub agreement: Agreement,
    /// The outcomes of other settings. Empty if the replay does not reproduce the recording.
    pub outcomes: Vec<SettingOutcome>,
    /// The memory of the replayed device under other settings, in bytes.
    pub limit: u64,
}

/// The device, the settings and the limits of a replay.
#[derive(Clone, Debug)]
pub struct WhatIfQuery {
    /// The device ordinal.
    pub device: i16,
    /// The run's own settings.
    pub settings: AllocatorSettings,
    /// The limit of `set_per_process_memory_fraction`, in bytes; `None` if unknown.
    pub allowed: Option<u64>,
    /// The memory that the allocator could have had, in bytes.
    pub limit: u64,
    /// `seq` of the out-of-memory event to explain. The replay ends there.
    pub oom: Option<u64>,
}

/// Replays one device of a recording, under the run's own settings and under others. It observes the recording's events
/// one by one.
#[derive(Debug)]
pub struct PolicyReplay {
    query: WhatIfQuery,
    own: [OwnPolicy; 2],
    others: Vec<OtherSetting>,
    private: bool,
    has_cuda_events: bool,
    cuda_refused: bool,
    ended: bool,
}

/// An operation of CUDA: address and size in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CudaOperation {
    Obtained(u64, u64),
    Released(u64, u64),
    Mapped(u64, u64),
    Unmapped(u64, u64),
}

impl CudaOperation {
    fn gains(self) -> bool {
        matches!(self, CudaOperation::Obtained(..) | CudaOperation::Mapped(..))
    }
}

/// The run's own policy, with one of the two orders between equal blocks.
#[derive(Debug)]
struct OwnPolicy {
    policy: Policy<Recorded>,
    granted: Addresses,
    blocks: u64,
    difference: Option<(u64, String)>,
}

/// The recorded device: its operations since the last request.
#[derive(Debug, Default)]
struct Recorded {
    operations: VecDeque<CudaOperation>,
    reproduced: u64,
    difference: Option<String>,
    /// Whether the policy sees addresses that increase with the segments' age. Otherwise it sees the recorded
    /// addresses.
    by_age: bool,
    next: u64,
    /// By the segment address that the policy sees: the recorded address.
    real: BTreeMap<u64, u64>,
}

impl Recorded {
    fn expect(&mut self, operation: CudaOperation) -> bool {
        let same = self.operations.front() == Some(&operation);
        if same {
            self.operations.pop_front();
            self.reproduced += 1;
        } else {
            self.differ(format!("the policy did {operation:x?}, the recording has {:x?}", self.operations.front()));
        }
        same
    }

    fn differ(&mut self, what: String) {
        self.difference.get_or_insert(what);
    }

    /// The address that the policy sees for a recorded one.
    fn place(&mut self, real: u64, size: u64) -> u64 {
        if !self.by_age {
            return real;
        }
        self.next += 1 << 21;
        let at = self.next;
        self.next = at.saturating_add(size);
        self.real.insert(at, real);
        at
    }

    /// The recorded address for one that the policy sees.
    fn real(&self, addr: u64) -> u64 {
        let segment = self.real.range(..=addr).next_back();
        segment.map_or(addr, |(at, real)| real.wrapping_add(addr - at))
    }
}

impl PolicyDevice for Recorded {
    fn obtain(&mut self, size: u64) -> Option<u64> {
        match self.operations.front() {
            Some(&CudaOperation::Obtained(real, _)) => {
                self.expect(CudaOperation::Obtained(real, size)).then(|| self.place(real, size))
            }
            // The recording has no operation here, or a release of memory comes first. Either way CUDA had refused the
            // request.
            _ => None,
        }
    }

    fn release(&mut self, addr: u64, size: u64) {
        let real = self.real(addr);
        self.real.remove(&addr);
        self.expect(CudaOperation::Released(real, size));
    }

    fn reserve(&mut self, size: u64) -> u64 {
        match self.operations.front() {
            Some(&CudaOperation::Mapped(real, _)) => self.place(real, size),
            // The recorded mapping fails, so no address is known.
            _ => 1 << 62,
        }
    }

    fn map(&mut self, addr: u64, size: u64) -> bool {
        match self.operations.front() {
            Some(CudaOperation::Mapped(..)) => self.expect(CudaOperation::Mapped(self.real(addr), size)),
            _ => false,
        }
    }

    fn unmap(&mut self, addr: u64, size: u64) {
        self.expect(CudaOperation::Unmapped(self.real(addr), size));
    }
}

impl OwnPolicy {
    fn new(query: &WhatIfQuery, by_age: bool) -> OwnPolicy {
        let mut policy = Policy::new(query.settings.clone(), Recorded { by_age, ..Recorded::default() });
        policy.allowed_memory_maximum = query.allowed;
        OwnPolicy { policy, granted: Addresses::default(), blocks: 0, difference: None }
    }

    fn alloc(&mut self, e: &Event) {
        let granted = self.policy.alloc(e.size, e.stream, e.pool);
        let real = granted.map(|granted| self.policy.device.real(granted.addr));
        match granted {
            Some(granted) if real == Some(e.addr) => {
                self.granted.insert(e.addr, granted.addr);
                self.blocks += 1;
            }
            _ => {
                let what = format!("the policy puts {} bytes at {real:x?}, the recording has {:x}", e.size, e.addr);
                self.policy.device.differ(what);
            }
        }
        self.check_all_reproduced();
    }

    fn free(&mut self, e: &Event) {
        let freed = self.granted.remove(&e.addr).is_some_and(|addr| self.policy.free(addr));
        if !freed {
            self.policy.device.differ(format!("the recording frees {:x}, where no block is", e.addr));
        }
    }

    fn oom(&mut self, e: &Event) {
        if self.policy.alloc(e.size, e.stream, e.pool).is_some() {
            let what = format!("the policy has {} bytes, the recording has an out-of-memory error", e.size);
            self.policy.device.differ(what);
        }
        self.check_all_reproduced();
    }

    /// Ends CUDA's part of a request. A recorded operation that the policy did not make is a difference.
    fn check_all_reproduced(&mut self) {
        if let Some(operation) = self.policy.device.operations.front() {
            let difference = format!("the recording has {operation:x?}, the policy has no reason for it");
            self.policy.device.differ(difference);
        }
    }

    /// Releases the cache if the operations before this event released all unused memory. A partial release is left to
    /// the request, whose policy must reproduce it.
    ///
    /// Returns `None` if nothing, or only a part, was released. Otherwise returns whether the release cannot be due to
    /// this event's request.
    fn replay_releases(&mut self, e: &Event, request: bool) -> Option<bool> {
        let operations = &self.policy.device.operations;
        let first = *operations.front()?;
        if let Some(operation) = operations.iter().rev().find(|operation| operation.gains()) {
            self.policy.settings.expandable = matches!(operation, CudaOperation::Mapped(..));
        }
        if first.gains() {
            return None;
        }
        let returned: Vec<CudaOperation> =
            operations.iter().take_while(|operation| !operation.gains()).copied().collect();
        let unrelated = !request || self.policy.serves_from_cache(e.size, e.stream, e.pool);
        let releasable = self.policy.releasable_now();
        let all = releasable.into_iter().map(|(addr, size, pages)| {
            let real = self.policy.device.real(addr);
            if pages { CudaOperation::Unmapped(real, size) } else { CudaOperation::Released(real, size) }
        });
        let all: Vec<CudaOperation> = all.collect();
        if returned.starts_with(&all) {
            self.policy.release_cached();
            while let Some(&CudaOperation::Released(real, size)) = self.policy.device.operations.front() {
                let at = self.policy.device.real.iter().find(|(_, of)| **of == real).map_or(real, |(at, _)| *at);
                if !self.policy.release_private(at, size) {
                    break;
                }
            }
        }
        if !request {
            self.check_all_reproduced();
        }
        returned.starts_with(&all).then_some(unrelated)
    }
}

/// Policies with another setting, on devices whose addresses go up and down.
#[derive(Debug)]
struct OtherSetting {
    setting: &'static CandidateSetting,
    runs: [OtherRun; 2],
}

#[derive(Debug)]
struct OtherRun {
    policy: Policy<LimitedDevice>,
    granted: Addresses,
    failed: Option<u64>,
    fits: Option<bool>,
    /// The address of the block for the failed request, if the request fits.
    explained: Option<u64>,
}

impl OtherRun {
    fn alloc(&mut self, e: &Event) {
        match self.policy.alloc(e.size, e.stream, 0) {
            Some(granted) => {
                self.granted.insert(e.addr, granted.addr);
            }
            None => self.failed = Some(e.seq),
        }
    }

    fn free(&mut self, addr: u64) {
        if let Some(addr) = self.granted.remove(&addr) {
            self.policy.free(addr);
        }
    }

    fn oom(&mut self, e: &Event, explained: bool) {
        let granted = self.policy.alloc(e.size, e.stream, 0);
        if explained {
            self.fits = Some(granted.is_some());
            self.explained = granted.map(|granted| granted.addr);
        } else if let Some(granted) = granted {
            // The program continued without this block.
            self.policy.free(granted.addr);
        }
    }
}

impl OtherRun {
    /// Replays the rest of the interrupted step. The device gets more memory where it has too little, and the result
    /// says how much.
    fn continue_step(&mut self, rest: &RestOfStep) -> Option<StepOutcome> {
        let mut new: Vec<Option<u64>> = vec![Some(self.explained?)];
        let given = self.policy.device.limit;
        for event in rest.events.iter().skip(1) {
            match event {
                RestEvent::Requested { requested, stream, .. } => {
                    let addr = self.alloc_with_more_memory(*requested, *stream);
                    new.push(addr);
                }
                RestEvent::FreeRequested(_) => {}
                RestEvent::FreeCompleted(RestBlock::New(number)) => {
                    if let Some(addr) = new.get_mut(*number).and_then(Option::take) {
                        self.policy.free(addr);
                    }
                }
                RestEvent::FreeCompleted(RestBlock::Old { addr, .. }) => self.free(*addr),
            }
        }
        let short = self.policy.device.limit - given;
        Some(StepOutcome { short, peak_reserved: self.policy.peak_reserved() })
    }

    fn alloc_with_more_memory(&mut self, requested: u64, stream: u64) -> Option<u64> {
        if let Some(granted) = self.policy.alloc(requested, stream, 0) {
            return Some(granted.addr);
        }
        let limit = std::mem::replace(&mut self.policy.device.limit, u64::MAX);
        let granted = self.policy.alloc(requested, stream, 0);
        self.policy.device.limit = limit.max(self.policy.device.used_bytes());
        granted.map(|granted| granted.addr)
    }
}

impl PolicyReplay {
    /// Makes a replay of this device with these settings and limits.
    pub fn new(query: WhatIfQuery) -> PolicyReplay {
        let other = |setting: &'static CandidateSetting| {
            let own = &query.settings;
            let settings = own.with(setting.name);
            // Blocks of expandable segments are split whatever their size.
            if settings == *own || !own.native || own.expandable && settings.max_split_size != own.max_split_size {
                return None;
            }
            let run = |downwards| OtherRun {
                policy: Policy::new(settings.clone(), LimitedDevice::new(query.limit, downwards)),
                granted: Addresses::default(),
                failed: None,
                fits: None,
                explained: None,
            };
            Some(OtherSetting { setting, runs: [run(false), run(true)] })
        };
        let others = candidate_settings().iter().filter_map(other).collect();
        let own = [OwnPolicy::new(&query, true), OwnPolicy::new(&query, false)];
        PolicyReplay { query, own, others, private: false, has_cuda_events: false, cuda_refused: false, ended: false }
    }

    /// Observes the next event of the recording.
    pub fn observe(&mut self, e: &Event) {
        if self.ended || self.own.iter().all(|own| own.difference.is_some()) {
            return;
        }
        if e.source != Source::Torch {
            self.has_cuda_events |= matches!(e.source, Source::Driver | Source::Runtime);
            self.cuda_refused |= e.action == Action::Alloc && e.result != 0 && e.flags.contains(Flags::IN_ALLOCATOR);
            return;
        }
        if e.device != self.query.device {
            return;
        }
        let operation = match e.action {
            Action::SegmentAlloc => CudaOperation::Obtained(e.addr, e.size),
            Action::SegmentFree => CudaOperation::Released(e.addr, e.size),
            Action::SegmentMap => CudaOperation::Mapped(e.addr, e.size),
            Action::SegmentUnmap => CudaOperation::Unmapped(e.addr, e.size),
            _ => return self.request(e),
        };
        self.own.iter_mut().for_each(|own| own.policy.device.operations.push_back(operation));
    }

    fn request(&mut self, e: &Event) {
        let asks = matches!(e.action, Action::Alloc | Action::Oom);
        if !asks && !matches!(e.action, Action::FreeRequested | Action::FreeCompleted) {
            return;
        }
        self.private |= e.pool != 0;
        let mut emptied = None;
        for own in self.own.iter_mut().filter(|own| own.difference.is_none()) {
            emptied = own.replay_releases(e, asks).or(emptied);
            match e.action {
                Action::Alloc => own.alloc(e),
                Action::FreeCompleted => own.free(e),
                Action::Oom => own.oom(e),
                _ => {}
            }
            own.difference = own.policy.device.difference.take().map(|what| (e.seq, what));
        }
        // The program emptied the cache. A release for lack of memory would not have happened under other settings.
        let empties = emptied.is_some_and(|unrelated| unrelated || (self.has_cuda_events && !self.cuda_refused));
        self.cuda_refused &= !asks;
        self.ended = e.action == Action::Oom && self.query.oom == Some(e.seq);
        for run in self.others.iter_mut().flat_map(|o| &mut o.runs).filter(|run| run.failed.is_none()) {
            if empties {
                run.policy.release_cached();
            }
            match e.action {
                Action::Alloc => run.alloc(e),
                Action::FreeCompleted => run.free(e.addr),
                Action::Oom => run.oom(e, self.ended),
                _ => {}
            }
        }
    }

    /// Ends the replay and returns its result. `rest` is the rest of the step that the explained error interrupted.
    pub fn finish(mut self, rest: Option<&RestOfStep>) -> WhatIf {
        if !self.ended {
            for own in self.own.iter_mut().filter(|own| own.difference.is_none()) {
                own.replay_releases(&Event::EMPTY, false);
                own.difference = own.policy.device.difference.take().map(|what| (0, what));
            }
        }
        // The order that reproduced more of the recording counts.
        let [by_age, by_address] = &self.own;
        let rank = |own: &OwnPolicy| (own.difference.is_none(), own.blocks);
        let best = if rank(by_age) >= rank(by_address) { by_age } else { by_address };
        let agreement = Agreement {
            blocks: best.blocks,
            segments: best.policy.device.reproduced,
            difference: best.difference.clone(),
            peak_reserved: best.policy.peak_reserved(),
        };
        // The replay cannot know when memory of private pools is released: that depends on their CUDA graphs.
        let sound = agreement.difference.is_none() && !self.private && (self.ended || self.query.oom.is_none());
        // Devices whose addresses go up correspond to the order by age.
        let orders = if by_address.difference.is_some() { 1 } else { 2 };
        let outcomes =
            if sound { self.others.iter_mut().map(|other| other.outcome(orders, rest)).collect() } else { Vec::new() };
        WhatIf { agreement, outcomes, limit: self.query.limit }
    }
}

impl OtherSetting {
    fn outcome(&mut self, orders: usize, rest: Option<&RestOfStep>) -> SettingOutcome {
        let runs = || self.runs.iter().take(orders);
        let fits = |run: &OtherRun| run.fits.or(run.failed.map(|_| false));
        let first = self.runs.first().and_then(fits);
        let mut outcome = SettingOutcome {
            setting: self.setting,
            fits: first.filter(|_| runs().all(|run| fits(run) == first)),
            fails_earlier: runs().filter_map(|run| run.failed).min(),
            peak_reserved: runs().map(|run| run.policy.peak_reserved()).max().unwrap_or(0),
            reserved: runs().map(|run| run.policy.reserved()).max().unwrap_or(0),
            step: None,
        };
        if let Some(rest) = rest.filter(|rest| outcome.fits == Some(true) && rest.uncertain == 0) {
            let steps = self.runs.iter_mut().take(orders).filter_map(|run| run.continue_step(rest));
            outcome.step = steps.max_by_key(|step| (step.short, step.peak_reserved));
        }
        outcome
    }
}
