//! Checks which GPUs a program that is started here can use.

use std::path::Path;

use super::diagnosis::{Finding, Gpu};
use super::units::{bytes, count};
use crate::gpu::{self, Answer};

/// `CUDA_ERROR_NO_DEVICE` of cuda.h.
const NO_DEVICE: i32 = 100;

/// Asks the driver for its devices. Must be called while this process has one thread.
pub(super) fn gpus() -> (Finding, Vec<Gpu>) {
    let answer = gpu::ask();
    let gpus = match &answer {
        Answer::Devices(devices) => {
            devices.iter().map(|d| Gpu { name: d.name.clone(), memory_bytes: d.memory }).collect()
        }
        _ => Vec::new(),
    };
    (judge(&answer, driver_version().as_deref(), cards()), gpus)
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

fn judge(answer: &Answer, version: Option<&str>, cards: usize) -> Finding {
    let what = "GPU";
    let driver = version.map_or("NVIDIA driver".to_owned(), |v| format!("NVIDIA driver {v}"));
    match answer {
        Answer::NoDriver => {
            let bare = Path::new("/sys/bus/pci/drivers/nvidia").exists();
            let found = "no NVIDIA driver: CPU tensors are recorded";
            if bare {
                Finding::off(what, "the driver is loaded and its devices are not here", container())
            } else {
                Finding::unused(what, found)
            }
        }
        Answer::Hidden => Finding::note(what, format!("{driver}; CUDA_VISIBLE_DEVICES hides every GPU"))
            .with_mend("unset CUDA_VISIBLE_DEVICES"),
        Answer::NoLibrary => Finding::off(
            what,
            format!("{driver}, but libcuda.so.1 cannot be loaded: programs cannot use the GPU"),
            container(),
        ),
        Answer::Refused(NO_DEVICE) if cards == 0 => Finding::unused(what, format!("{driver}, no GPU")),
        Answer::Refused(code) => Finding::off(
            what,
            format!("{driver}, but it refuses to start (CUresult {code}): programs cannot use the GPU"),
            "see whether nvidia-smi works; make kernel module and libcuda of one version, then restart the machine or container",
        ),
        Answer::Silent => Finding::off(
            what,
            format!("{driver}, but it does not answer within 3 s"),
            "see whether nvidia-smi answers; turn persistence mode on: nvidia-smi -pm 1",
        ),
        Answer::Devices(devices) => {
            let first = devices.first().map(|d| format!(": {}, {}", d.name, bytes(d.memory))).unwrap_or_default();
            let more = if devices.len() > 1 { ", ..." } else { "" };
            Finding::ok(what, format!("{driver}, {}{first}{more}", count(devices.len() as u64, "GPU")))
        }
    }
}

fn container() -> &'static str {
    "in a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's libcuda"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::diagnosis::State;
    use crate::gpu::Device;

    #[test]
    fn each_answer_has_its_words() {
        let device = Device { name: "NVIDIA H200".into(), memory: 150 << 30 };
        let state = |answer: &Answer| judge(answer, Some("580.1"), 1).state;
        assert_eq!(state(&Answer::Devices(vec![device.clone(); 2])), State::Ok);
        assert_eq!(state(&Answer::Hidden), State::Note);
        for answer in [Answer::NoLibrary, Answer::Refused(803), Answer::Silent] {
            let finding = judge(&answer, None, 1);
            assert!(finding.is_off() && finding.mend.is_some(), "{finding:?}");
        }
        assert_eq!(judge(&Answer::Refused(NO_DEVICE), None, 0).state, State::Unused);
        let words = judge(&Answer::Devices(vec![device]), Some("580.1"), 1).found;
        assert_eq!(words, "NVIDIA driver 580.1, 1 GPU: NVIDIA H200, 150 GiB");
    }
}
