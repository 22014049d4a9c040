//! The pod, container and Slurm job that a cgroup path names.
//!
//! The kernel writes the path, but users choose the names of groups below those that were delegated to them. So only
//! names at the places count where Kubernetes, Slurm and container runtimes put them, and the outermost one of each
//! kind: whatever a container or a user's session makes is inside of it. A path that begins with `..` is that of a
//! process outside of the cgroup namespace of the reader.

use memtrace_analysis::load::Workload;

/// The prefixes of the names of container groups, with the runtime's separator.
const CONTAINER_PREFIXES: [&str; 6] = ["docker-", "cri-containerd-", "crio-", "libpod-", "nerdctl-", "podman-"];
/// The length of a container's id in characters, in hexadecimal.
const CONTAINER_ID: usize = 64;

/// The workload that the text of `/proc/PID/cgroup` names. Version 1 has a line for each hierarchy.
pub(super) fn workload(text: &str) -> Workload {
    let mut all = Workload::default();
    for line in text.lines() {
        // `4:memory:/path`, or `0::/path` of version 2. The path may contain colons.
        let Some(path) = line.splitn(3, ':').nth(2) else { continue };
        let found = of_path(path);
        for (to, from) in [
            (&mut all.pod_uid, found.pod_uid),
            (&mut all.container_id, found.container_id),
            (&mut all.slurm_job, found.slurm_job),
            (&mut all.slurm_step, found.slurm_step),
        ] {
            if to.is_none() {
                *to = from;
            }
        }
    }
    all
}

fn of_path(path: &str) -> Workload {
    let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty() && *name != "..").collect();
    let mut found = Workload::default();
    let Some(first) = names.first() else { return found };
    // The session of a user: containers without root are there. Everything else is only named so.
    let is_of_user = *first == "user.slice";
    if !is_of_user {
        // A group of another container ends what the node itself has named.
        let outer = names.iter().position(|name| container_id(name).is_some()).unwrap_or(names.len());
        found.pod_uid = pod_uid(&names[..(outer + 1).min(names.len())]);
        (found.slurm_job, found.slurm_step) = slurm(&names[..outer]);
    }
    found.container_id = names.iter().find_map(|name| container_id(name)).map(str::to_owned);
    found
}

/// The UID of the pod in `kubepods/burstable/podUID` or `kubepods.slice/...-podUID.slice`.
fn pod_uid(names: &[&str]) -> Option<String> {
    let is_root = |name: &&str| name.starts_with("kubepods") || name.starts_with("kubelet");
    // containerd with systemd groups, but without its systemd driver, names the group
    // `kubepods-podUID.slice:cri-containerd:ID` below the service.
    let is_of_service = |name: &&str| name.starts_with("kubepods-") && name.contains(":cri-containerd:");
    if !names.first().is_some_and(is_root) && !names.iter().any(is_of_service) {
        return None;
    }
    names.iter().find_map(|name| {
        let name = name.split(':').next().unwrap_or_default();
        let systemd = || Some(name.strip_suffix(".slice")?.rsplit_once("-pod")?.1.replace('_', "-"));
        // A pod below no class of service is `kubepods-podUID.slice`, and one of the cgroupfs driver `podUID`.
        let uid = name.strip_prefix("pod").map(str::to_owned).or_else(systemd)?;
        let is_uid = matches!(uid.len(), 32 | 36) && uid.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        is_uid.then_some(uid)
    })
}

/// The job and the step in `slurm/uid_1000/job_4711/step_0` or `system.slice/slurmstepd.scope/job_4711/step_0`.
fn slurm(names: &[&str]) -> (Option<String>, Option<String>) {
    let jobs = match names {
        // With several daemons on a host, the name of the node is in the name of the group.
        ["system.slice", scope, jobs @ ..] if scope.ends_with("slurmstepd.scope") => jobs,
        [root, jobs @ ..] if *root == "slurm" || root.starts_with("slurm_") => jobs,
        _ => return (None, None),
    };
    let jobs = match jobs {
        [user, jobs @ ..] if user.starts_with("uid_") => jobs,
        jobs => jobs,
    };
    let mut names = jobs.iter();
    let is_short = |text: &&str| !text.is_empty() && text.len() <= 20;
    let is_number = |text: &&str| is_short(text) && text.chars().all(|c| c.is_ascii_digit());
    let job = names.next().and_then(|name| name.strip_prefix("job_")).filter(is_number);
    let step = names.next().filter(|_| job.is_some()).and_then(|name| name.strip_prefix("step_"));
    let step = step.filter(|step| is_short(step) && step.chars().all(|c| c.is_ascii_alphanumeric()));
    (job.map(str::to_owned), step.map(str::to_owned))
}

/// The id in `docker-ID.scope`, `cri-containerd-ID.scope`, `...:cri-containerd:ID` or `ID`.
fn container_id(name: &str) -> Option<&str> {
    let name = name.rsplit(':').next().unwrap_or_default();
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = CONTAINER_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let is_id = id.len() == CONTAINER_ID && id.chars().all(|c| c.is_ascii_hexdigit());
    is_id.then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a";
    const OTHER: &str = "0000000000000000000000000000000000000000000000000000000000000001";
    const UID: &str = "1b2c3d4e-5f60-4718-9a2b-3c4d5e6f7081";

    fn of(text: &str) -> [Option<String>; 4] {
        let text = text.replace("{uid_}", &UID.replace('-', "_")).replace("{uid}", UID);
        let text = text.replace("{id}", ID).replace("{other}", OTHER);
        let found = workload(&text);
        [found.pod_uid, found.container_id, found.slurm_job, found.slurm_step]
    }

    /// Compares what the text names with the expected pod, container, job and step. An empty text is none.
    #[track_caller]
    fn check(text: &str, [pod, container, job, step]: [&str; 4]) {
        let known = |expected: &str| Some(expected.to_owned()).filter(|text| !text.is_empty());
        assert_eq!(of(text), [pod, container, job, step].map(known), "{text}");
    }

    #[test]
    fn kubernetes() {
        for path in [
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
            "0::/kubepods.slice/kubepods-pod{uid_}.slice/crio-{id}.scope",
            "0::/kubepods/besteffort/pod{uid}/{id}",
            "11:memory:/kubepods/pod{uid}/{id}\n1:name=systemd:/kubepods/pod{uid}/{id}",
            "4:memory:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/docker-{id}.scope",
            "0::/system.slice/containerd.service/kubepods-besteffort-pod{uid_}.slice:cri-containerd:{id}",
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{uid_}.slice/cri-containerd-{id}.scope",
            "0::/../../kubepods-pod{uid_}.slice/cri-containerd-{id}.scope",
            // Whatever a container makes is inside of its group.
            "0::/kubepods/pod{uid}/{id}/kubepods/pod00000000000000000000000000000000/{other}",
        ] {
            check(path, [UID, ID, "", ""]);
        }
        // A static pod has the hash of its file.
        let hash = "0123456789abcdef0123456789abcdef";
        check(&format!("0::/kubepods/burstable/pod{hash}/{ID}"), [hash, ID, "", ""]);
    }

    #[test]
    fn containers() {
        for path in [
            "0::/system.slice/docker-{id}.scope",
            "5:cpu,cpuacct:/docker/{id}\n4:memory:/docker/{id}",
            "0::/machine.slice/libpod-{id}.scope/container",
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{id}.scope",
            "0::/default/{id}",
            "0::/../docker-{id}.scope",
            "0::/docker/{id}/docker/{other}",
        ] {
            check(path, ["", ID, "", ""]);
        }
    }

    #[test]
    fn slurm_jobs() {
        check("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", ["", "", "4711", "0"]);
        check("0::/system.slice/gpu7_slurmstepd.scope/job_4711/step_batch/user/task_0", ["", "", "4711", "batch"]);
        check("9:memory:/slurm/uid_1000/job_4711/step_extern\n2:cpuset:/", ["", "", "4711", "extern"]);
        check("9:memory:/slurm_gpu7/uid_1000/job_4711", ["", "", "4711", ""]);
        check("0::/system.slice/slurmstepd.scope/system", ["", "", "", ""]);
        check("0::/system.slice/slurmstepd.scope/job_1/step_0/{id}/job_2/step_1", ["", ID, "1", "0"]);
    }

    #[test]
    fn names_that_users_choose_say_nothing() {
        let none = ["", "", "", ""];
        for path in [
            "",
            "0::/",
            "0::",
            "0",
            "garbage",
            "0::/user.slice/user-1000.slice/session-3.scope",
            "0::/user.slice/user-1000.slice/user@1000.service/kubepods-pod{uid_}.slice",
            "0::/user.slice/user-1000.slice/user@1000.service/slurm/uid_0/job_1/step_0",
            "0::/user.slice/system.slice/slurmstepd.scope/job_1/step_0",
            "0::/app/kubepods/pod{uid}",
            "0::/app/slurm/job_1",
            "0::/slurm/uid_0/job_1;rm -rf/step_0",
            "0::/slurm/job_999999999999999999999",
            "0::/kubepods/pod\u{1b}]0;x\u{7}0000000000000000000000000000",
            "0::/docker-3f2a.scope",
        ] {
            check(path, none);
        }
        // A container may name groups inside of its own as it likes.
        check("0::/docker/{id}/slurm/uid_0/job_1", ["", ID, "", ""]);
        check("0::/docker/{id}/kubepods/pod1b2c3d4e5f6047189a2b3c4d5e6f7081", ["", ID, "", ""]);
    }
}
