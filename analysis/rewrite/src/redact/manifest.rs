//! `run.json`, and the info of a process. A text whose key is not known is treated as a name of the program.

use serde_json::{Map, Value};

use super::texts::Texts;
use memtrace_input::printable;

/// Keys whose texts come from memtrace or the driver: times, states, reasons, the product name of the GPU.
const OURS: [&str; 14] = [
    "memtrace",
    "gpu",
    "state",
    "started",
    "ended",
    "trace",
    "end_reason",
    "status",
    "topic",
    "discovery",
    "reason",
    "version",
    "kind",
    "signal",
];
/// Objects whose keys are names that memtrace gives.
const COUNTS: [&str; 3] = ["counters", "losses", "refused"];
/// Variables that say which rank a process is, and how PyTorch's allocator is set. Their values have no names.
const VARIABLES: [&str; 27] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "JAX_PROCESS_ID",
    "JAX_NUM_PROCESSES",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
];

pub(super) fn manifest(texts: &mut Texts, text: &str) -> serde_json::Result<String> {
    let value: Value = serde_json::from_str(text)?;
    let redacted = redact(texts, "", value);
    Ok(printable::json(serde_json::to_string_pretty(&redacted)?) + "\n")
}

pub(super) fn info(texts: &mut Texts, text: &str) -> serde_json::Result<String> {
    let value: Map<String, Value> = serde_json::from_str(text)?;
    serde_json::to_string(&redact(texts, "", Value::Object(value)))
}

fn redact(texts: &mut Texts, key: &str, value: Value) -> Value {
    match value {
        Value::Object(map) if key == "env" => {
            Value::Object(map.into_iter().filter(|(k, v)| is_setting(k, v)).collect())
        }
        Value::Object(map) if COUNTS.contains(&key) => {
            Value::Object(map.into_iter().filter(|(_, value)| value.is_number()).collect())
        }
        Value::Object(mut map) => {
            // The copy of a trace has another length.
            if map.contains_key("trace") {
                map.remove("bytes");
            }
            let pairs = map.into_iter().map(|(key, value)| {
                let value = redact(texts, &key, value);
                (key, value)
            });
            Value::Object(pairs.collect())
        }
        Value::Array(items) if matches!(key, "argv" | "command") => {
            let argument = |(at, item): (usize, Value)| match item {
                Value::String(text) => Value::String(texts.argument(&text, at == 0)),
                other => redact(texts, "", other),
            };
            Value::Array(items.into_iter().enumerate().map(argument).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(|item| redact(texts, key, item)).collect()),
        Value::String(text) => Value::String(match key {
            "directory" | "cwd" | "exe" | "program" => texts.path(&text),
            "host" | "name" => texts.host(&text),
            "kernel" | "nvidia_driver" => String::new(),
            "text" | "write_error" => texts.sentence(&text),
            key if OURS.contains(&key) => text,
            _ => texts.name(&text),
        }),
        other => other,
    }
}

/// Whether a variable stays: one of the list, with a value of numbers, or of settings of the allocator.
fn is_setting(name: &str, value: &Value) -> bool {
    let Some(value) = value.as_str() else { return false };
    let is_number = value.chars().all(|c| c.is_ascii_digit());
    let is_conf = name.ends_with("ALLOC_CONF")
        && value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | ',' | '.' | '[' | ']' | ' '));
    VARIABLES.contains(&name) && (is_number || is_conf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stay_and_names_go() {
        let text = r#"{"version": 2, "command": ["python", "acme_train.py", "--user", "alice"],
            "directory": "/home/alice", "host": "acme-gpu-7",
            "machine": {"name": "acme-gpu-7", "kernel": "6.1-acme", "cpus": 8}, "exit": {"code": 0},
            "simulated": {"gpu": "NVIDIA H100 80GB HBM3"},
            "processes": [{"pid": 7, "env": {"RANK": "3", "SLURM_JOB_NAME": "acme", "PYTORCH_CUDA_ALLOC_CONF":
            "expandable_segments:True", "LOCAL_RANK": "alice"}, "counters": {"names_us": 5}, "end_reason": "exited",
            "notices": [{"topic": "python", "text": "verified", "status": "works"}], "new": "acme"}],
            "unrecordable": [{"pid": 9, "program": "/home/alice/acme", "reason": "it is setuid", "uses_cuda": true}]}"#;
        let mut texts = Texts::new([5; 32]);
        let redacted = manifest(&mut texts, text).unwrap();
        for word in ["acme", "alice", "--user"] {
            assert!(!redacted.contains(word), "{word}: {redacted}");
        }
        let value: Value = serde_json::from_str(&redacted).unwrap();
        assert_eq!((&value["exit"]["code"], &value["machine"]["cpus"]), (&0.into(), &8.into()));
        let process = &value["processes"][0];
        let env = serde_json::json!({"RANK": "3", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"});
        assert_eq!((&process["env"], &process["counters"]["names_us"]), (&env, &5.into()));
        assert_eq!((&process["end_reason"], &process["notices"][0]["text"]), (&"exited".into(), &"verified".into()));
        assert_eq!(
            (&value["command"][0], &value["unrecordable"][0]["reason"]),
            (&"python".into(), &"it is setuid".into())
        );
        assert_eq!(value["host"], value["machine"]["name"]);
        assert_eq!(value["simulated"]["gpu"], "NVIDIA H100 80GB HBM3");
        assert!(info(&mut texts, "[1]").is_err());
    }
}
