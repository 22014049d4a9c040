//! The processes of a tree that use CUDA, and what the driver would not bring back.

use std::collections::BTreeSet;

use super::driver::{CheckpointDriver, ProcessState};
use crate::proc::ProcessDir;

/// A process of the tree that uses CUDA.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Member {
    pub(crate) pid: u32,
    pub(crate) state: ProcessState,
}

/// A process and all its descendants that use CUDA, in the order of their pids. This process is none of them, whoever
/// has started it.
pub(crate) fn members(driver: &dyn CheckpointDriver, root: u32) -> Vec<Member> {
    let (mut tree, mut queue) = (BTreeSet::from([root]), vec![root]);
    while let Some(pid) = queue.pop() {
        queue.extend(ProcessDir::of(pid).children().into_iter().filter(|child| tree.insert(*child)));
    }
    tree.remove(&std::process::id());
    tree.into_iter().filter_map(|pid| Some(Member { pid, state: driver.state(pid).ok()? })).collect()
}

/// Why a process must not be suspended, although the driver would do it. `None` if nothing is known.
///
/// The driver saves a process that shares GPU memory over NCCL, but does not restore it (error 801 of
/// `cuCheckpointProcessRestore`, driver 580, two H100): the job would be lost.
pub(crate) fn obstacle(process: &ProcessDir) -> Option<&'static str> {
    let maps = process.mappings().unwrap_or_default();
    let variables = process.variables().unwrap_or_default();
    let threads = process.thread_names();
    has_nccl_communicator(&threads, &maps, &variables)
        .then_some("it shares GPU memory with other ranks over NCCL, and the driver cannot restore such memory")
}

/// Whether a process communicates over NCCL. Every process of PyTorch has loaded the library.
fn has_nccl_communicator(threads: &[String], maps: &str, variables: &[String]) -> bool {
    // PyTorch 2.5 and newer give the threads of a process group these names; NCCL its own, where
    // `NCCL_SET_THREAD_NAME` is set.
    let has_thread = threads.iter().any(|name| name.starts_with("pt_nccl_") || name.starts_with("NCCL "));
    // The memory in which ranks of one host exchange data. NCCL removes its name at once.
    let has_memory = maps.lines().any(|line| line.contains("/dev/shm/nccl-"));
    let world: Option<u32> = variables.iter().find_map(|v| v.strip_prefix("WORLD_SIZE=")?.parse().ok());
    let is_rank = world.is_some_and(|size| size > 1) && maps.lines().any(|line| line.contains("/libnccl"));
    has_thread || has_memory || is_rank
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_are_recognized_and_the_library_alone_is_none() {
        let library = "7f00-7f01 r-xp 0 fe:00 1 /x/nvidia/nccl/lib/libnccl.so.2\n";
        let shared = "7f00-7f01 rw-s 0 00:1a 7 /dev/shm/nccl-8gEzQk (deleted)\n";
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for (threads, maps, variables, expected) in [
            (&["python", "pt_autograd_0"][..], library, &["HOME=/root"][..], false),
            (&["python", "pt_nccl_watchdg"], library, &[], true),
            (&["python", "NCCL Service 0"], library, &[], true),
            (&["python"], shared, &[], true),
            (&["python"], library, &["WORLD_SIZE=2"], true),
            (&["python"], library, &["WORLD_SIZE=1"], false),
            (&["python"], "", &["WORLD_SIZE=2"], false),
        ] {
            let found = has_nccl_communicator(&names(threads), maps, &names(variables));
            assert_eq!(found, expected, "{threads:?} {maps:?} {variables:?}");
        }
    }
}
