//! A redacted run says the same as the run itself, and has none of its names.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_analysis::load::{MANIFEST_FILE, MemoryRecording};
use memtrace_analysis::{FinishOptions, RunFolder, finish_run, open_run, redact_run};
use memtrace_trace::definition::{Definition, NoticeStatus, TensorKind};
use memtrace_trace::file::{Reader, Writer};
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};
use serde_json::Value;

use crate::showcase::{Words, program};

const PRIVATE: Words = Words {
    file: "/home/alice/acme/secret_model.py",
    function: "acme_attend",
    label: "alice epoch 3",
    module: "acme_blocks.0",
    class: "AcmeBlock",
    node: "AcmeFnBackward",
    thread: "acme-worker",
    argument: "/home/alice/acme/run_acme.py",
    device: "Test GPU",
};
/// The words that must not be in any file of a redacted run.
const SECRETS: [&str; 9] = ["alice", "acme", "Acme", "secret", "train.py", "worker", "epoch", "token", "hostess"];

/// The recording as a trace, with names of tensors, a reference cycle and a notice.
fn trace(recording: MemoryRecording) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &recording.info).unwrap();
    let mut put = |definition: Definition<'_>| {
        let mut encoded = Vec::new();
        definition.encode(&mut encoded);
        writer.definition(&encoded).unwrap();
    };
    let d = &recording.definitions;
    for (id, frame) in d.frames.iter().enumerate().skip(1) {
        let (id, line, first_line) = (FrameId(id as u32), frame.line, frame.first_line);
        let (name, qualname, filename) = (&*frame.name, &*frame.qualname, &*frame.filename);
        put(Definition::Frame { id, name, qualname, filename, line, first_line });
    }
    for (id, node) in d.stacks.iter().enumerate().skip(1) {
        put(Definition::Stack { id: StackId(id as u32), parent: node.parent, frame: node.frame });
    }
    for (id, context) in d.contexts.iter().enumerate().filter(|(_, context)| !context.node.is_empty()) {
        let (id, node) = (ContextId(id as u32), &*context.node);
        put(Definition::Context { id, node, forward: context.forward, module: context.module });
    }
    for (id, call) in &d.nn_calls {
        put(Definition::NnCall { id: *id, caller: call.caller, object: call.object, class: &call.class });
    }
    for name in &d.nn_names {
        put(Definition::NnName { object: name.object, seq: name.seq, class: &name.class, name: &name.name });
    }
    for (id, label) in &d.labels {
        put(Definition::Label { id: *id, origin: label.origin, text: &label.text });
    }
    for (id, thread) in d.threads.iter().enumerate().skip(1) {
        put(Definition::Thread { id: ThreadId(id as u32), tid: thread.tid, name: &thread.name });
    }
    for (ordinal, device) in &d.devices {
        let (total, used_before) = (device.total, device.used_before);
        let pci = format!("0000:{:02x}:00.0", 0xaa + ordinal);
        put(Definition::Device { ordinal: *ordinal, name: &device.name, total, used_before, pci: &pci });
    }
    let parameter = recording.events.iter().find(|e| e.size == 4 << 20).unwrap();
    let (address, seq) = (parameter.addr, recording.events.len() as u64);
    let (kind, shape) = (TensorKind::Parameter, "float32[1024, 1024]");
    put(Definition::TensorName { address, seq, kind, name: "acme_blocks.0.weight", shape });
    let text = "AcmeBlock.parent -> list[0] -> AcmeBlock; AcmeBlock.value -> Tensor float32[16]";
    put(Definition::Cycle { address, seq, file: "cycle-0.html", text });
    let text = "no Python stacks: /home/alice/acme/libpython3.12.so is not a library of AcmeBlock";
    put(Definition::Notice { topic: "python", text, status: NoticeStatus::Remark });
    for event in &recording.events {
        writer.event(event).unwrap();
    }
    writer.finish(recording.end.as_ref().unwrap()).unwrap()
}

/// The names that each word of the run has in the redacted run.
#[derive(Default)]
struct Names {
    new: BTreeMap<String, String>,
    old: BTreeMap<String, String>,
}

impl Names {
    /// A name must become one name, and no other may become it.
    fn assert_one(&mut self, old: &str, new: &str, at: &str) {
        assert_eq!(self.new.entry(old.to_owned()).or_insert_with(|| new.to_owned()), new, "{at}");
        assert_eq!(self.old.entry(new.to_owned()).or_insert_with(|| old.to_owned()), old, "{at}");
    }

    fn assert_text(&mut self, old: &str, new: &str, at: &str) {
        let words = |text: &str| -> Vec<String> {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let mut parts: Vec<String> = Vec::new();
            for c in text.chars() {
                match parts.last_mut().filter(|part| part.chars().all(is_word) == is_word(c)) {
                    Some(part) => part.push(c),
                    None => parts.push(c.to_string()),
                }
            }
            parts
        };
        let (a, b) = (words(old), words(new));
        assert_eq!(a.len(), b.len(), "{at}: {old} {new}");
        for (a, b) in a.iter().zip(&b) {
            self.assert_one(a, b, at);
        }
    }

    /// Numbers and structure must be equal, and names must correspond.
    fn assert_same(&mut self, old: &Value, new: &Value, at: &str) {
        match (old, new) {
            (Value::Object(a), Value::Object(b)) => {
                // A copy has no bus ids.
                let kept = |keys: serde_json::map::Keys<'_>| -> Vec<String> {
                    keys.filter(|key| *key != "pci_bus_id").cloned().collect()
                };
                assert_eq!(kept(a.keys()), kept(b.keys()), "{at}");
                assert!(!b.contains_key("pci_bus_id"), "{at}");
                for key in kept(a.keys()) {
                    self.assert_same(&a[&key], &b[&key], &format!("{at}.{key}"));
                }
            }
            (Value::Array(a), Value::Array(b)) => {
                assert_eq!(a.len(), b.len(), "{at}: {old} {new}");
                for (i, (a, b)) in a.iter().zip(b).enumerate() {
                    self.assert_same(a, b, &format!("{at}[{i}]"));
                }
            }
            (Value::String(a), Value::String(b)) => {
                let key = at.rsplit(['.', '[']).find(|part| !part.ends_with(']')).unwrap_or_default();
                match key {
                    // The folder of the run.
                    "path" if at.ends_with("run.path") => assert_eq!(b, "copy"),
                    // Whole names, whose number of words can differ.
                    "filename" | "object" | "host" | "hosts" | "argv" | "command" => self.assert_one(a, b, at),
                    // A notice has a path.
                    "text" if at.contains("notices") => {}
                    _ => self.assert_text(a, b, at),
                }
            }
            (a, b) => assert_eq!(a, b, "{at}"),
        }
    }
}

fn json(folder: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

#[test]
fn a_redacted_run_gives_the_same_report_without_a_name() {
    let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for rank in 0..2 {
        let mut recording = program(&PRIVATE, rank).recording;
        recording.info = recording.info.replacen('{', r#"{"host": "hostess-7", "cwd": "/home/alice/acme", "#, 1);
        recording.info = recording.info.replace(r#""RANK""#, r#""SLURM_JOB_NAME": "token", "RANK""#);
        std::fs::write(folder.path().join(format!("{}.mtr", 7 + rank)), trace(recording)).unwrap();
    }
    let manifest = r#"{"version": 2, "memtrace": "0.1.0", "command": ["python", "run_acme.py", "--token", "secret"],
        "directory": "/home/alice/acme", "host": "hostess-7", "state": "ended", "exit": {"code": 0},
        "processes": [{"pid": 7, "trace": "7.mtr", "argv": ["python", "run_acme.py"]}]}"#;
    std::fs::write(folder.path().join(MANIFEST_FILE), manifest).unwrap();
    // A page of a reference cycle is not copied.
    std::fs::write(folder.path().join("cycle-0.html"), "AcmeBlock").unwrap();
    finish_run(&RunFolder::open(folder.path()).unwrap(), &FinishOptions::default(), &mut |_| {}).unwrap();
    let run = open_run(folder.path()).unwrap();
    let out = RunFolder::open(copy.path()).unwrap();
    let options = FinishOptions { shown_path: Some("copy".into()), ..FinishOptions::default() };
    let written = redact_run(&run, &out, [9; 32], &options, &mut |_| {}).unwrap();
    assert!(written.problems.is_empty(), "{:?}", written.problems);

    let mut names = Names::default();
    names.assert_same(&json(folder.path(), "summary.json"), &json(copy.path(), "summary.json"), "");
    let kept = |name: &str| names.new.get(name).is_some_and(|new| new == name);
    for name in ["_call_impl", "Adam", "AddmmBackward0", "forward", "weight", "python", "activations"] {
        assert!(kept(name) || !names.new.contains_key(name), "{name} is public: {:?}", names.new.get(name));
    }
    let changed = ["acme_attend", "acme_blocks", "alice"];
    for name in changed {
        assert!(names.new.get(name).is_some_and(|new| new != name), "{name}: {:?}", names.new.get(name));
    }

    let files = std::fs::read_dir(copy.path()).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert!(files.len() >= 8, "{files:?}");
    for path in &files {
        let mut content = vec![std::fs::read(path).unwrap()];
        if path.extension().is_some_and(|extension| extension == "mtr") {
            // Definitions are compressed in the file.
            let reader = Reader::open(path).unwrap();
            content.push(format!("{:?} {}", reader.definitions(), reader.info()).into_bytes());
            assert!(reader.damage().is_none());
        }
        for (secret, content) in SECRETS.iter().flat_map(|secret| content.iter().map(move |c| (secret, c))) {
            let at = content.windows(secret.len()).position(|window| window == secret.as_bytes());
            let around =
                |at: usize| String::from_utf8_lossy(&content[at.saturating_sub(60)..content.len().min(at + 60)]);
            assert_eq!(at.map(around), None, "{secret} in {}", path.display());
        }
    }
    let original = std::fs::read(folder.path().join("7.pickle").with_file_name("rank0.pickle")).unwrap();
    assert!(SECRETS[..4].iter().all(|secret| original.windows(secret.len()).any(|w| w == secret.as_bytes())));
}

#[test]
fn another_key_gives_other_names() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("7.mtr"), trace(program(&PRIVATE, 0).recording)).unwrap();
    let run = open_run(folder.path().join("7.mtr")).unwrap();
    let copy = |key: u8| {
        let copy = tempfile::tempdir().unwrap();
        let options = FinishOptions { shown_path: Some("copy".into()), ..FinishOptions::default() };
        redact_run(&run, &RunFolder::open(copy.path()).unwrap(), [key; 32], &options, &mut |_| {}).unwrap();
        std::fs::read_to_string(copy.path().join("summary.json")).unwrap()
    };
    assert_eq!(copy(1), copy(1), "names come from the key alone");
    assert_ne!(copy(1), copy(2));
}
