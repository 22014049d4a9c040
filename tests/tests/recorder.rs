//! Our event list against PyTorch's own recorder, on in the same process: action, address, size, stream, device, order and
//! Python frames, one for one.

use memtrace_tests::oracle::compare;
use memtrace_tests::victim::Victim;

#[test]
fn mlp() {
    let (run, _) = compare(Victim::python("torch/mlp.py", &[]));
    // What a real H200 gave for this program.
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "peak 489624576 reserved 494927872\n");
}

#[test]
fn resnet50() {
    compare(Victim::python("torch/resnet50.py", &[]));
}

#[test]
fn transformer_under_autocast() {
    compare(Victim::python("torch/transformer_amp.py", &[]));
}

#[test]
fn streams_with_deferred_frees() {
    let (_, oracle) = compare(Victim::python("torch/streams.py", &[]).env("SIMCUDA_KERNEL_US", "100"));
    let deferred =
        oracle.entries()[&0].windows(2).any(|w| w[0].action == "free_requested" && w[1].action != "free_completed");
    assert!(deferred, "the program defers frees");
}

#[test]
fn expandable_segments() {
    let (_, oracle) =
        compare(Victim::python("torch/expandable.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"));
    assert!(oracle.entries()[&0].iter().any(|e| e.action == "segment_unmap"), "the program unmaps");
}

#[test]
fn out_of_memory_with_retry() {
    let (_, oracle) = compare(Victim::python("torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G"));
    assert_eq!(oracle.entries()[&0].iter().filter(|e| e.action == "oom").count(), 2);
}

#[test]
fn two_devices_and_threads() {
    let (_, oracle) = compare(Victim::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2"));
    assert_eq!(oracle.entries().len(), 2);
}

#[test]
fn data_loader_workers_are_left_alone() {
    // `compare` demands that there is one trace: workers that only make CPU tensors leave none.
    let (run, _) = compare(Victim::python("torch/loader.py", &[]));
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "rows 64\n");
}
