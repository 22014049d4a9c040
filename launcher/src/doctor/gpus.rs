//! Checks which GPUs a program that is started here can use.

use std::path::Path;

use super::report::{Check, Gpu};
use super::units::{bytes, count};
use crate::gpu::{self, DriverState};

/// `CUDA_ERROR_NO_DEVICE` of cuda.h.
const NO_DEVICE: i32 = 100;

/// Queries the driver for its devices. Must be called while this process has one thread.
pub(super) fn gpus() -> (Check, Vec<Gpu>) {
    let state = gpu::query();
    let gpus = match &state {
        DriverState::Devices(devices) => {
            devices.iter().map(|d| Gpu { name: d.name.clone(), memory_bytes: d.memory }).collect()
        }
        _ => Vec::new(),
    };
    (check(&state, driver_version().as_deref(), cards()), gpus)
}

/// The driver's version, such as `580.159.04`. `None` when there is no driver.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version = |w: &&str| w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// The number of cards that the kernel driver lists, whether or not a program can use them.
fn cards() -> usize {
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count)
}

fn check(state: &DriverState, version: Option<&str>, cards: usize) -> Check {
    let name = "GPU";
    let driver = version.map_or("NVIDIA driver".to_owned(), |v| format!("NVIDIA driver {v}"));
    match state {
        DriverState::NoDriver => {
            let has_kernel_module = Path::new("/sys/bus/pci/drivers/nvidia").exists();
            if has_kernel_module {
                Check::failed(name, "the kernel module is loaded, but its devices are not visible here", container())
            } else {
                Check::unused(name, "no NVIDIA driver; CPU tensors are recorded")
            }
        }
        DriverState::Hidden => Check::note(name, format!("{driver}; CUDA_VISIBLE_DEVICES hides every GPU"))
            .with_fix("unset CUDA_VISIBLE_DEVICES"),
        DriverState::NoLibrary => Check::failed(
            name,
            format!("{driver}, but libcuda.so.1 cannot be loaded, so programs cannot use the GPU"),
            container(),
        ),
        DriverState::Failed(NO_DEVICE) if cards == 0 => Check::unused(name, format!("{driver}, no GPU")),
        DriverState::Failed(code) => Check::failed(
            name,
            format!("{driver}, but cuInit fails (CUresult {code}), so programs cannot use the GPU"),
            "check nvidia-smi; install kernel module and libcuda of one version, then restart the machine or container",
        ),
        DriverState::TimedOut => Check::failed(
            name,
            format!("{driver}, but it does not answer within 3 s"),
            "check nvidia-smi; enable persistence mode: nvidia-smi -pm 1",
        ),
        DriverState::Devices(devices) => {
            let first = devices.first().map(|d| format!(": {}, {}", d.name, bytes(d.memory))).unwrap_or_default();
            let more = if devices.len() > 1 { ", ..." } else { "" };
            Check::ok(name, format!("{driver}, {}{first}{more}", count(devices.len() as u64, "GPU")))
        }
    }
}

fn container() -> &'static str {
    "in a container, start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise install the \
     driver's libcuda"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::CheckStatus;
    use crate::gpu::Device;

    #[test]
    fn each_driver_state_has_a_check() {
        let device = Device { name: "NVIDIA H200".into(), memory: 150 << 30 };
        let status = |state: &DriverState| check(state, Some("580.1"), 1).status;
        assert_eq!(status(&DriverState::Devices(vec![device.clone(); 2])), CheckStatus::Ok);
        assert_eq!(status(&DriverState::Hidden), CheckStatus::Note);
        for state in [DriverState::NoLibrary, DriverState::Failed(803), DriverState::TimedOut] {
            let check = check(&state, None, 1);
            assert!(check.has_failed() && check.fix.is_some(), "{check:?}");
        }
        assert_eq!(check(&DriverState::Failed(NO_DEVICE), None, 0).status, CheckStatus::Unused);
        let detail = check(&DriverState::Devices(vec![device]), Some("580.1"), 1).detail;
        assert_eq!(detail, "NVIDIA driver 580.1, 1 GPU: NVIDIA H200, 150 GiB");
    }
}
