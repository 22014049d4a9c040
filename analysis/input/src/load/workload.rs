//! The pod, container, Slurm job and user of a process.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The length to which a container's id is shortened in texts, in characters, as `docker ps` does.
const SHORT_ID: usize = 12;

/// The pod, container, Slurm job and user to which a process belongs, as far as they are known.
///
/// The cgroup path gives the ids, which the process cannot choose. Names of the pod and the container of a recorded
/// process come from its environment, and those of another process's pod from the node's log folder.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Workload {
    /// The name of the Kubernetes pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The UID of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The Kubernetes namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name of the container in its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The id of the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// The id of the Slurm job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<String>,
    /// The step of the Slurm job: a number, `batch`, `extern` or `interactive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slurm_step: Option<String>,
    /// The name of the user, or the user id if it has no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

impl Workload {
    /// Whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        *self == Workload::default()
    }

    /// The names and values that label a process in metrics. A container without a name has its id.
    pub fn labels(&self) -> Vec<(&'static str, &str)> {
        let all = [
            ("pod", &self.pod),
            ("namespace", &self.namespace),
            ("container", if self.container.is_some() { &self.container } else { &self.container_id }),
            ("slurm_job", &self.slurm_job),
            ("user", &self.user),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))).collect()
    }

    /// The workload in a few words: `pod trainer-7f`, `Slurm job 4711.0 of alice` or `container 3f2a1b0c9d8e`. `None`
    /// if nothing is known.
    pub fn text(&self) -> Option<String> {
        if let Some(pod) = &self.pod {
            return Some(format!("pod {pod}"));
        }
        if let Some(uid) = &self.pod_uid {
            return Some(format!("pod UID {uid}"));
        }
        let of = self.user.as_ref().map(|user| format!(" of {user}")).unwrap_or_default();
        if let Some(job) = &self.slurm_job {
            let step = self.slurm_step.as_ref().map(|step| format!(".{step}")).unwrap_or_default();
            return Some(format!("Slurm job {job}{step}{of}"));
        }
        if let Some(id) = &self.container_id {
            return Some(format!("container {}{of}", id.chars().take(SHORT_ID).collect::<String>()));
        }
        self.user.as_ref().map(|user| format!("user {user}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_without_a_name_is_labelled_with_its_id() {
        let workload = |name: &str| Workload {
            container: Some(name.to_owned()).filter(|name| !name.is_empty()),
            container_id: Some("3f".to_owned()),
            ..Workload::default()
        };
        assert_eq!(workload("").labels(), [("container", "3f")]);
        assert_eq!(workload("main").labels(), [("container", "main")]);
    }

    #[test]
    fn the_text_names_the_most_specific_workload() {
        let text = |json: &str| serde_json::from_str::<Workload>(json).unwrap().text();
        assert_eq!(text(r#"{"pod": "trainer-7f", "pod_uid": "1", "user": "root"}"#).unwrap(), "pod trainer-7f");
        assert_eq!(text(r#"{"pod_uid": "1b", "container_id": "3f"}"#).unwrap(), "pod UID 1b");
        let job = r#"{"slurm_job": "4711", "slurm_step": "batch", "user": "alice"}"#;
        assert_eq!(text(job).unwrap(), "Slurm job 4711.batch of alice");
        assert_eq!(text(r#"{"container_id": "3f2a1b0c9d8e7f6a"}"#).unwrap(), "container 3f2a1b0c9d8e");
        assert_eq!(text(r#"{"user": "1000"}"#).unwrap(), "user 1000");
        assert_eq!(text("{}"), None);
    }
}
