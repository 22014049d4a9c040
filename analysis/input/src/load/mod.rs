//! Turns paths into streams of events: run folders, their manifests, and the recordings of single processes.

mod device_samples;
mod host_samples;
mod job_id;
mod manifest;
mod problem;
mod process;
mod process_names;
mod rank;
mod recording;
mod run;
mod snapshot;
mod snapshot_set;
mod unrecorded;
mod workload;

pub use crate::recording::{LostEvents, MemoryRecording, Recording};
pub use device_samples::{
    DEVICE_SAMPLES_FILE, DEVICE_SAMPLES_VERSION, DeviceSample, DeviceSamples, DeviceSamplesLine,
    MAX_DEVICE_SAMPLES_BYTES, SampledDevice, SampledProcess,
};
pub use host_samples::{
    HOST_SAMPLES_FILE, HOST_SAMPLES_VERSION, HostLimitKind, HostProcess, HostProcessName, HostSample, HostSamples,
    HostSamplesEnd, HostSamplesLine, HostSharedFile, MAX_HOST_SAMPLES_BYTES,
};
pub use job_id::{JobId, JobIdSource};
pub use manifest::{
    AttachedRun, BoundingRun, Discovery, EstimatedWorkspaces, Exit, GuessedBranch, GuessedKind, GuessedSize,
    MANIFEST_FILE, MANIFEST_VERSION, MAX_MANIFEST_BYTES, Machine, Manifest, ManifestNotice, ManifestProcess,
    MissingFunction, NotRecorded, PeakBounds, RunState, STATICALLY_LINKED, SimulatedGpus, UnrecordableProcess,
    ValueException,
};
pub use problem::Problem;
pub use process::{Process, ProcessInfo};
pub use rank::{RankSource, RankVariables};
pub use recording::TraceRecording;
pub use run::open_folder;
pub use run::{Run, open_run, open_run_with_progress, open_runs};
pub use snapshot::{SNAPSHOT_END_REASON, SNAPSHOT_TOPIC, SnapshotRecording};
pub use unrecorded::unrecorded;
pub use workload::Workload;
