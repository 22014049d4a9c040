//! The pod, container, Slurm job and user of a process.
//!
//! A recorded process is that of the user who runs memtrace: its environment names its pod. Other processes choose
//! their environment and their names, so only the kernel speaks for them: the cgroup path, and the user.
//! kubelet's log folder, which only root can change, has the names of the node's pods.

mod cgroup;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use memtrace_analysis::load::Workload;
use memtrace_analysis::printable;

use crate::bounded_read::read_limited;

/// The variables by which the downward API passes the name of the pod on, by convention.
const POD_NAMES: [&str; 4] = ["POD_NAME", "MY_POD_NAME", "K8S_POD_NAME", "KUBERNETES_POD_NAME"];
/// Those of the namespace.
const NAMESPACES: [&str; 5] =
    ["POD_NAMESPACE", "MY_POD_NAMESPACE", "K8S_POD_NAMESPACE", "KUBERNETES_NAMESPACE", "K8S_NAMESPACE"];
/// Those of the container.
const CONTAINER_NAMES: [&str; 3] = ["CONTAINER_NAME", "MY_CONTAINER_NAME", "K8S_CONTAINER_NAME"];
/// Where Kubernetes puts the namespace into each container that has a service account.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Where kubelet has a folder `NAMESPACE_NAME_UID` for each pod of the node.
const POD_LOGS: &str = "/var/log/pods";
/// The maximum number of folders that are read there.
const MAX_PODS: usize = 4096;
/// The maximum length of a name in characters. Labels of Kubernetes have as many.
const MAX_NAME: usize = 63;
/// The maximum length of the list of cgroups, and of other files of a process, in bytes.
const FILE_LIMIT: u64 = 64 << 10;
/// The maximum length of the list of users in bytes.
const USERS_LIMIT: u64 = 1 << 20;

/// Whether a variable of a recorded process names its workload.
pub(crate) fn is_variable(name: &str) -> bool {
    let known = [&POD_NAMES[..], &NAMESPACES, &CONTAINER_NAMES, &["HOSTNAME", "KUBERNETES_SERVICE_HOST"]];
    known.iter().any(|names| names.contains(&name))
}

/// The workload of a recorded process, with the variables of its environment.
pub(crate) fn of_recorded(pid: u32, variable: &dyn Fn(&str) -> Option<String>) -> Workload {
    let mut workload = of_kernel(Path::new("/proc"), pid);
    let own_namespace = || read_text(Path::new(NAMESPACE_FILE), FILE_LIMIT).ok();
    complete(&mut workload, variable, &own_namespace);
    workload
}

/// The workload of a process that is not recorded.
pub(crate) fn of_other(pid: u32) -> Workload {
    let mut workload = of_kernel(Path::new("/proc"), pid);
    if let Some((namespace, pod)) = workload.pod_uid.as_deref().and_then(|uid| pod_of_node(Path::new(POD_LOGS), uid)) {
        (workload.namespace, workload.pod) = (Some(namespace), Some(pod));
    }
    workload
}

/// The facts that the kernel knows of a process: its cgroups and its user.
fn of_kernel(proc: &Path, pid: u32) -> Workload {
    let folder = proc.join(pid.to_string());
    let groups = read_text(&folder.join("cgroup"), FILE_LIMIT).unwrap_or_default();
    let status = read_text(&folder.join("status"), FILE_LIMIT).unwrap_or_default();
    // The real user. The owner of the folder is root for a process that cannot be dumped.
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse().ok());
    let user = uid.map(|uid| user_name(Path::new("/etc/passwd"), uid));
    Workload { user, ..cgroup::workload(&groups) }
}

/// The name of a user, or the id as text. Only the local list is read: others may ask the network, and wait for it.
fn user_name(users: &Path, uid: u32) -> String {
    let users = read_text(users, USERS_LIMIT).unwrap_or_default();
    let id = uid.to_string();
    // `name:password:uid:...`
    let name = users.lines().find(|line| line.split(':').nth(2) == Some(&id)).and_then(|line| line.split(':').next());
    name.and_then(name_of).unwrap_or(id)
}

/// Adds the names that the environment of a recorded process has.
fn complete(
    workload: &mut Workload,
    variable: &dyn Fn(&str) -> Option<String>,
    own_namespace: &dyn Fn() -> Option<String>,
) {
    let first = |names: &[&str]| names.iter().find_map(|name| name_of(&variable(name)?));
    if workload.pod_uid.is_some() || variable("KUBERNETES_SERVICE_HOST").is_some() || first(&POD_NAMES).is_some() {
        // The name of the host is that of the pod, unless the pod has the network of its host.
        workload.pod = first(&POD_NAMES).or_else(|| first(&["HOSTNAME"]));
        workload.namespace = first(&NAMESPACES).or_else(|| name_of(&own_namespace()?));
        workload.container = first(&CONTAINER_NAMES);
    }
    if workload.slurm_job.is_none() {
        // Slurm without cgroups.
        workload.slurm_job = first(&["SLURM_JOB_ID", "SLURM_JOBID"]);
        workload.slurm_step = workload.slurm_job.as_ref().and_then(|_| first(&["SLURM_STEP_ID", "SLURM_STEPID"]));
    }
}

/// The namespace and the name of a pod of this node. `None` if it is unknown, or if others than root can name pods.
fn pod_of_node(logs: &Path, uid: &str) -> Option<(String, String)> {
    let folder = std::fs::symlink_metadata(logs).ok()?;
    let is_of_root = folder.is_dir() && folder.uid() == 0 && folder.mode() & 0o022 == 0;
    let mut pods = is_of_root.then(|| std::fs::read_dir(logs).ok())??.flatten().take(MAX_PODS);
    pods.find_map(|pod| {
        let folder = pod.file_name().into_string().ok()?;
        let (names, of) = folder.rsplit_once('_')?;
        let (namespace, name) = names.split_once('_')?;
        Some((name_of(namespace)?, name_of(name)?)).filter(|_| of == uid)
    })
}

/// A name that can be displayed. `None` if it is empty.
fn name_of(text: &str) -> Option<String> {
    let name: String = printable::line(text.trim()).chars().take(MAX_NAME).collect();
    Some(name).filter(|name| !name.is_empty())
}

fn read_text(path: &Path, limit: u64) -> std::io::Result<String> {
    read_limited(path, limit).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn completed(mut workload: Workload, variables: &[(&str, &str)], namespace: Option<&str>) -> Workload {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        let variable = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        complete(&mut workload, &variable, &|| namespace.map(str::to_owned));
        workload
    }

    fn named(pod: &str, namespace: Option<&str>, container: Option<&str>) -> Workload {
        let text = |text: &str| Some(text.to_owned());
        Workload {
            pod: text(pod),
            namespace: namespace.and_then(text),
            container: container.and_then(text),
            ..Workload::default()
        }
    }

    #[test]
    fn the_environment_names_the_pod_of_a_recorded_process() {
        let nothing = Workload::default();
        let in_kubernetes = ("KUBERNETES_SERVICE_HOST", "10.0.0.1");
        let host = ("HOSTNAME", "trainer-7f");
        let found = completed(nothing.clone(), &[in_kubernetes, host], Some("ml\n"));
        assert_eq!(found, named("trainer-7f", Some("ml"), None));
        let downward = [("POD_NAME", "trainer-0"), ("POD_NAMESPACE", "team"), ("CONTAINER_NAME", "main"), host];
        assert_eq!(completed(nothing.clone(), &downward, Some("ml")), named("trainer-0", Some("team"), Some("main")));
        // A host has a name too, and no pod.
        assert_eq!(completed(nothing.clone(), &[host], None), nothing);
        let in_pod = Workload { pod_uid: Some("1b".to_owned()), ..nothing };
        assert_eq!(completed(in_pod, &[host], None).pod.as_deref(), Some("trainer-7f"));
    }

    #[test]
    fn the_environment_names_a_slurm_job_without_cgroups() {
        let variables = [("SLURM_JOB_ID", "4711"), ("SLURM_STEP_ID", "0")];
        let found = completed(Workload::default(), &variables, None);
        assert_eq!(found.text().as_deref(), Some("Slurm job 4711.0"));
        let kernel = Workload { slurm_job: Some("1".to_owned()), ..Workload::default() };
        assert_eq!(completed(kernel.clone(), &variables, None), kernel, "the kernel knows better");
    }

    #[test]
    fn hostile_names_can_be_displayed_and_are_bounded() {
        let hostile = format!("\x1b]0;x\x07\u{202e}{}", "x".repeat(5000));
        let pod = completed(Workload::default(), &[("POD_NAME", &hostile)], None).pod.unwrap();
        assert!(!pod.contains(printable::is_unprintable) && pod.chars().count() == MAX_NAME, "{pod}");
    }

    #[test]
    fn the_kernel_speaks_for_other_processes() {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("7");
        std::fs::create_dir(&process).unwrap();
        let id = "3f".repeat(32);
        std::fs::write(process.join("cgroup"), format!("0::/system.slice/docker-{id}.scope\n")).unwrap();
        std::fs::write(process.join("environ"), "POD_NAME=innocent\0SLURM_JOB_ID=1\0").unwrap();
        std::fs::write(process.join("status"), "Name:\tx\\nUid: 7\nUid:\t54321\t0\t0\t0\n").unwrap();
        let found = of_kernel(folder.path(), 7);
        assert_eq!((found.container_id, found.pod, found.slurm_job), (Some(id), None, None));
        assert_eq!(found.user.as_deref(), Some("54321"));
        assert_eq!(of_kernel(folder.path(), 8), Workload::default(), "it has ended");
    }

    #[test]
    fn users_have_names_or_numbers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "root:x:0:0::/root:/bin/sh\nal\x1bice:x:1000:1000\nbroken\n").unwrap();
        let name = |uid| user_name(file.path(), uid);
        assert_eq!([name(0), name(1000), name(7)], ["root", "al\u{fffd}ice", "7"]);
        assert_eq!(user_name(Path::new("/nonexistent"), 5), "5");
    }

    #[test]
    fn the_node_names_pods_if_only_root_can() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        for name in ["ml_trainer-7f_1b2c", "kube-system_dns_00", "broken", "a_b"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        if std::fs::metadata(folder.path()).unwrap().uid() == 0 {
            let expected = ("ml".to_owned(), "trainer-7f".to_owned());
            assert_eq!(pod_of_node(folder.path(), "1b2c"), Some(expected));
            assert_eq!(pod_of_node(folder.path(), "1b"), None);
        }
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(pod_of_node(folder.path(), "1b2c"), None);
    }
}
