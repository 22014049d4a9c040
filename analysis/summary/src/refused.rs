//! Requests for memory that CUDA has refused to a library or to the program itself: who asked for how much, and what
//! would have served it.

use memtrace_insight::StackSummary;
use memtrace_insight::passes::{Analysis, RefusedRequest};
use memtrace_insight::rules::allocation_error;
use memtrace_insight::units::{count_text, size_text};
use memtrace_replay::Owner;
use memtrace_trace::file::Definitions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::conclusions::{VerdictStatement, VerdictStatus};
use crate::owners::{OwnerBytes, UNUSED_POOLS, by_owner, owner_name};

/// How many owners of memory a sentence names.
const NAMED_OWNERS: usize = 3;

/// A request for memory that CUDA refused to a caller other than PyTorch's caching allocator, and that did not succeed
/// later. Several requests of one place are one.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RefusedRequestSummary {
    /// The device ordinal. -1 for page-locked host memory.
    pub device: i16,
    /// The smallest request, in bytes.
    pub requested_bytes: u64,
    /// How many requests of this place were refused.
    pub count: u64,
    /// The library that called CUDA, for example `cuBLAS`, or the file name of the program.
    pub caller: String,
    /// The CUDA function, for example `cudaMalloc`.
    pub function: String,
    /// The stack of the request.
    pub requested_at: StackSummary,
    /// The step, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The free bytes of the device after the refusal, as the driver reported them. Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free_bytes: Option<u64>,
    /// The memory of the device in bytes. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_total_bytes: Option<u64>,
    /// The bytes that PyTorch's caching allocator would have given back in `torch.cuda.empty_cache()`.
    pub pytorch_releasable_bytes: u64,
    /// Further unused bytes of PyTorch's caching allocator, in segments with blocks in use.
    pub pytorch_blocked_bytes: u64,
    /// The memory of the process on the device, by owner, by bytes in descending order. PyTorch's is without the unused
    /// bytes.
    pub in_use: Vec<OwnerBytes>,
    /// Whether the process failed without allocating memory again. Absent if it is unknown how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
    /// The refusal as a statement, without the device's name.
    pub text: String,
    /// Why it was refused, and what would have served it, as sentences.
    pub details: Vec<String>,
}

/// The refused requests of a process. `stack` is the summary of a stack. `success` is true if the process succeeded.
pub(crate) fn refused_requests(
    analysis: &Analysis,
    definitions: &Definitions,
    stack: &dyn Fn(&RefusedRequest) -> StackSummary,
    success: Option<bool>,
) -> Vec<RefusedRequestSummary> {
    let mut requests: Vec<RefusedRequestSummary> = analysis
        .refused
        .requests
        .iter()
        .map(|refused| {
            let mut summary = facts(refused, definitions, stack(refused), success);
            summary.text = summary.statement();
            summary.details = summary.explanation();
            summary
        })
        .collect();
    requests.sort_by_key(|one| std::cmp::Reverse((one.fatal == Some(true), one.requested_bytes)));
    requests
}

fn facts(
    refused: &RefusedRequest,
    definitions: &Definitions,
    requested_at: StackSummary,
    success: Option<bool>,
) -> RefusedRequestSummary {
    let memory = &refused.memory;
    let (releasable, blocked) = memory.reserved.as_ref().map_or((0, 0), |one| (one.releasable, one.blocked));
    let mut in_use = by_owner(memory.outside_pytorch.iter().copied(), definitions);
    if let Some(reserved) = memory.reserved.as_ref().filter(|reserved| reserved.allocated + reserved.pending_free > 0) {
        in_use.push(OwnerBytes { owner: "PyTorch".to_owned(), bytes: reserved.allocated + reserved.pending_free });
    }
    if memory.unused_pools > 0 {
        in_use.push(OwnerBytes { owner: UNUSED_POOLS.to_owned(), bytes: memory.unused_pools });
    }
    in_use.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.owner.cmp(&b.owner)));
    RefusedRequestSummary {
        device: refused.device,
        requested_bytes: refused.requested,
        count: refused.times,
        caller: owner_name(Owner::Module(refused.caller.module), definitions).to_owned(),
        function: refused.caller.api.symbol().unwrap_or("CUDA").trim_end_matches("_v2").to_owned(),
        requested_at,
        step: refused.step,
        device_free_bytes: memory.free_and_total.map(|(free, _)| free),
        device_total_bytes: memory.free_and_total.map(|(_, total)| total).filter(|total| *total > 0),
        pytorch_releasable_bytes: releasable,
        pytorch_blocked_bytes: blocked,
        in_use,
        fatal: success.map(|success| !success && !refused.continued),
        text: String::new(),
        details: Vec::new(),
    }
}

impl RefusedRequestSummary {
    /// The statement of the verdict. `device` is the device's name.
    pub(crate) fn verdict(&self, device: &str) -> VerdictStatement {
        let status = if self.fatal == Some(true) { VerdictStatus::Failed } else { VerdictStatus::Warning };
        let place = if self.device < 0 { String::new() } else { format!(" on {device}") };
        let text = format!("CUDA out of memory{place}: {}", self.text);
        VerdictStatement { status, text, details: self.details.clone() }
    }

    /// The request and how the process went on: `cuBLAS was refused 32 MiB at step 3, train.py:8 main`.
    fn statement(&self) -> String {
        let times = if self.count > 1 { format!(" {} times", count_text(self.count)) } else { String::new() };
        let least = if self.count > 1 { "at least " } else { "" };
        let kind = if self.device < 0 { " of page-locked host memory" } else { "" };
        let step = self.step.map(|step| format!(" at step {step}")).unwrap_or_default();
        let location = match self.requested_at.location.as_str() {
            "" => String::new(),
            location => format!(", {location}"),
        };
        let end = if self.fatal == Some(false) { "; the program continued" } else { "" };
        format!(
            "{} was refused {least}{}{kind}{times} ({}){step}{location}{end}",
            self.caller,
            size_text(self.requested_bytes),
            self.function
        )
    }

    fn explanation(&self) -> Vec<String> {
        let mut details = Vec::new();
        if let Some(free) = self.device_free_bytes {
            let short = self.requested_bytes.checked_sub(free).filter(|short| *short > 0);
            let short = short.map(|short| format!(", {} short", size_text(short))).unwrap_or_default();
            details.push(format!("{} free on the device{short}.", size_text(free)));
        }
        details.extend(self.would_have_served());
        if let Some(error) = allocation_error(&self.caller) {
            details.push(format!("{} reports it as {error}.", self.caller));
        }
        details
    }

    /// The change that would have left enough memory, or else the owners of the memory.
    fn would_have_served(&self) -> Option<String> {
        if let Some(total) = self.device_total_bytes.filter(|total| self.requested_bytes > *total) {
            return Some(format!("The device has {} in all.", size_text(total)));
        }
        let free = self.device_free_bytes.filter(|_| self.device >= 0)?;
        let (releasable, blocked) = (self.pytorch_releasable_bytes, self.pytorch_blocked_bytes);
        let unused = self.pytorch_unused();
        let fits_with = |more: u64| free.saturating_add(more) >= self.requested_bytes;
        if releasable > 0 && fits_with(releasable) {
            return Some(format!(
                "PyTorch cached {} that it did not use: call torch.cuda.empty_cache() before the request.",
                size_text(releasable)
            ));
        }
        if blocked > 0 && fits_with(unused) {
            return Some(format!(
                "PyTorch cached {} that it did not use, {} of it in segments with blocks in use: with \
                 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, torch.cuda.empty_cache() gives back most of both.",
                size_text(unused),
                size_text(blocked)
            ));
        }
        let pools = self.in_use.iter().find(|one| one.owner == UNUSED_POOLS).map_or(0, |one| one.bytes);
        if pools > 0 && fits_with(releasable.saturating_add(pools)) {
            return Some(format!(
                "Stream-ordered pools kept {} that nobody used: trim them before the request (cudaMemPoolTrimTo, or \
                 free_all_blocks() of the library's memory pool).",
                size_text(pools)
            ));
        }
        self.in_use_text(free)
    }

    /// All unused bytes of PyTorch's caching allocator.
    fn pytorch_unused(&self) -> u64 {
        self.pytorch_releasable_bytes.saturating_add(self.pytorch_blocked_bytes)
    }

    /// The largest owners of the memory.
    fn in_use_text(&self, free: u64) -> Option<String> {
        let known: u64 = self.in_use.iter().map(|one| one.bytes).sum();
        let unused = self.pytorch_unused();
        let others = self.device_total_bytes?.saturating_sub(free).saturating_sub(known + unused);
        let mut owners: Vec<(String, u64)> = self.in_use.iter().map(|one| (one.owner.clone(), one.bytes)).collect();
        owners.push(("the context and other processes".to_owned(), others));
        owners.push(("unused in PyTorch's cache".to_owned(), unused));
        owners.retain(|(_, bytes)| *bytes > 0);
        owners.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let named = owners.iter().take(NAMED_OWNERS).map(|(owner, bytes)| format!("{owner} {}", size_text(*bytes)));
        let named = named.collect::<Vec<_>>().join(", ");
        (!named.is_empty()).then(|| format!("In use at that time: {named}."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn request() -> RefusedRequestSummary {
        RefusedRequestSummary {
            requested_bytes: 81 * GIB,
            count: 1,
            caller: "libprobe.so".to_owned(),
            function: "cudaMalloc".to_owned(),
            device_free_bytes: Some(78 * GIB),
            device_total_bytes: Some(140 * GIB),
            fatal: Some(false),
            ..RefusedRequestSummary::default()
        }
    }

    #[test]
    fn the_statement_has_caller_bytes_and_outcome() {
        let statement = RefusedRequestSummary { step: Some(3), ..request() }.statement();
        assert_eq!(statement, "libprobe.so was refused 81.0 GiB (cudaMalloc) at step 3; the program continued");
        let host = RefusedRequestSummary { device: -1, count: 2, fatal: Some(true), ..request() };
        let verdict = RefusedRequestSummary { text: host.statement(), ..host }.verdict("GPU 0");
        assert_eq!(verdict.status, VerdictStatus::Failed);
        let text = "CUDA out of memory: libprobe.so was refused at least 81.0 GiB of page-locked host memory 2 times \
                    (cudaMalloc)";
        assert_eq!(verdict.text, text);
    }

    #[test]
    fn what_would_have_served_is_named() {
        let served = |change: &dyn Fn(&mut RefusedRequestSummary)| {
            let mut request = request();
            change(&mut request);
            request.would_have_served().unwrap_or_default()
        };
        let cached = served(&|one| one.pytorch_releasable_bytes = 60 * GIB);
        assert_eq!(
            cached,
            "PyTorch cached 60.0 GiB that it did not use: call torch.cuda.empty_cache() before the request."
        );
        let blocked = served(&|one| (one.pytorch_releasable_bytes, one.pytorch_blocked_bytes) = (2 * GIB, 2 * GIB));
        assert!(blocked.contains("expandable_segments:True"), "{blocked}");
        let pool = OwnerBytes { owner: UNUSED_POOLS.to_owned(), bytes: 9 * GIB };
        assert!(served(&|one| one.in_use.push(pool.clone())).contains("cudaMemPoolTrimTo"));
        assert_eq!(served(&|one| one.requested_bytes = 200 * GIB), "The device has 140 GiB in all.");
        let nccl = OwnerBytes { owner: "NCCL".to_owned(), bytes: 50 * GIB };
        assert_eq!(
            served(&|one| one.in_use.push(nccl.clone())),
            "In use at that time: NCCL 50.0 GiB, the context and other processes 12.0 GiB."
        );
        // A cache that is too small is a part of the sum.
        assert!(served(&|one| one.pytorch_releasable_bytes = GIB).contains("unused in PyTorch's cache 1.00 GiB"));
    }

    #[test]
    fn libraries_have_their_own_errors() {
        let details = RefusedRequestSummary { caller: "JAX".to_owned(), ..request() }.explanation();
        assert_eq!(details[0], "78.0 GiB free on the device, 3.00 GiB short.");
        assert_eq!(details.last().unwrap(), "JAX reports it as RESOURCE_EXHAUSTED.");
    }
}
