//! Redaction: a run for others, without the names of its program, its files, its host and its user.
//!
//! Names become pseudonyms by a keyed hash. The key is used for one redaction and kept nowhere, so nobody can test a
//! guess. Names of public packages stay, and so do the words that occur in the frames of such packages. Figures, ids,
//! line numbers, shapes and times stay.
//!
//! Reports rest on names in a few places: a file in a folder `optim`, a function with `attention` in its name. A frame
//! about which the rules would say something else keeps as much of its names as they need ([`FrameFacts`]).

mod manifest;
mod pseudonyms;
mod public;
mod symbols;
mod texts;

use std::io::Write;
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::{KeptBlock, KeptPosition, KeptProgress, KeptState};
use memtrace_trace::definition::{Definition, GRAPH_HOLDER, TensorKind};
use memtrace_trace::file::{Definitions, Frame, NewTexts, RewriteError, rewrite, untrusted};

use memtrace_insight::passes::{Category, Phase};
use memtrace_insight::rules::{CategoryRuleId, FrameFacts, is_cache_name, is_changed_by_eval};
use texts::Texts;

/// The number of bytes of a key.
pub const KEY_BYTES: usize = 32;

/// Redacts the files of one run.
#[derive(Debug)]
pub struct Redactor {
    texts: Texts,
}

impl Redactor {
    /// Makes a redactor with a random key.
    pub fn new(key: [u8; KEY_BYTES]) -> Redactor {
        Redactor { texts: Texts::new(key) }
    }

    /// Adds the names that one process defines, before any file is redacted: the names of the frames of public packages
    /// stay in every file of the run.
    pub fn add_public_names(&mut self, definitions: &Definitions) {
        let public = |frame: &&Frame| public::is_public_file(&frame.filename);
        for frame in definitions.frames.iter().filter(public) {
            self.texts.add_public(&frame.name);
            self.texts.add_public(&frame.qualname);
        }
    }

    /// Writes the redacted trace of the file at `path` to `out`, whose path is `out_path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or is no trace, and the errors of `out`.
    pub fn trace(&mut self, path: &Path, mut out: &mut dyn Write, out_path: &Path) -> Result<()> {
        let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        rewrite(&file, &mut out, self).map_err(|error| match error {
            RewriteError::Read(cause) => Error::Trace { path: path.to_owned(), cause },
            RewriteError::Write(cause) => Error::io(format!("cannot write {}", out_path.display()))(cause),
        })
    }

    /// The content of the file beside a redacted trace. Only the names of phases, categories and rules are in it.
    pub fn kept_state(&self, state: &KeptState) -> Vec<u8> {
        let phase = |name: &str| Phase::from_name(name).unwrap_or_default().name().into();
        let position = |old: &KeptPosition| KeptPosition { phase: phase(&old.phase), ..old.clone() };
        let is_known = |(category, rule): &(Box<str>, Box<str>)| {
            Category::named(category).is_some() && rule.parse::<CategoryRuleId>().is_ok()
        };
        let block = |old: &KeptBlock| KeptBlock {
            seq: old.seq,
            position: position(&old.position),
            phase: phase(&old.phase),
            classification: old.classification.clone().filter(is_known),
        };
        let progress = KeptProgress { position: position(&state.progress.position), ..state.progress.clone() };
        KeptState { progress, blocks: state.blocks.iter().map(block).collect(), ..*state }.to_file(None)
    }

    /// The text of a redacted `run.json`. `path` is that of the original, for the error.
    ///
    /// # Errors
    ///
    /// If it is no JSON.
    pub fn manifest(&mut self, text: &str, path: &Path) -> Result<String> {
        manifest::manifest(&mut self.texts, text).map_err(invalid(path))
    }

    /// The text of a redacted `symbols.json`. `path` is that of the original, for the error.
    ///
    /// # Errors
    ///
    /// If it is no JSON.
    pub fn symbols(&mut self, text: &str, path: &Path) -> Result<String> {
        symbols::symbols(&mut self.texts, text).map_err(invalid(path))
    }

    /// The name of a module's class.
    fn class(&mut self, class: &str) -> String {
        let new = self.texts.name(class);
        let is_changed = is_changed_by_eval(class) && !is_changed_by_eval(&new);
        if is_changed { format!("{new}Dropout") } else { new }
    }

    /// The names of a frame: the name, the qualified name and the file.
    fn frame(&mut self, name: &str, qualname: &str, filename: &str) -> [String; 3] {
        let texts = &mut self.texts;
        let frame = |name: &str, qualname: &str, filename: &str| Frame {
            name: name.into(),
            qualname: qualname.into(),
            filename: filename.into(),
            ..Frame::default()
        };
        let path = texts.path(filename);
        if public::is_public_file(filename) {
            return [name.to_owned(), qualname.to_owned(), path];
        }
        let facts = FrameFacts::of(&frame(name, qualname, filename));
        let (new_name, new_qualname) = (texts.name(name), texts.name(qualname));
        // Words that rules look for in any name.
        let (eval_name, train_name) = (format!("{new_name}_eval"), format!("{new_name}_train"));
        let ends = [1, 2, 3].map(|components| texts.path_with_end(filename, components));
        let paths = std::iter::once(&path).chain(&ends);
        let same = paths
            .flat_map(|path| {
                let names = [&*new_name, &*eval_name, &*train_name, name];
                let renamed = names.map(|name| (name, &*new_qualname, path));
                renamed.into_iter().chain([(name, qualname, path)])
            })
            .find(|(name, qualname, path)| FrameFacts::of(&frame(name, qualname, path)) == facts);
        let (name, qualname, path) = same.unwrap_or((&*new_name, &*new_qualname, &path));
        [name.to_owned(), qualname.to_owned(), path.clone()]
    }
}

fn invalid(path: &Path) -> impl FnOnce(serde_json::Error) -> Error {
    let context = format!("cannot redact {}", path.display());
    move |e| Error::io(context)(std::io::Error::other(e))
}

impl NewTexts for Redactor {
    fn info(&mut self, info: &str) -> String {
        // A text that is no JSON object means nothing to a reader.
        manifest::info(&mut self.texts, info).unwrap_or_else(|_| "{}".to_owned())
    }

    fn definition(&mut self, definition: &Definition<'_>, out: &mut Vec<u8>) {
        match *definition {
            Definition::Frame { id, name, qualname, filename, line, first_line } => {
                let [name, qualname, filename] = self.frame(name, qualname, filename);
                let (name, qualname, filename) = (&*name, &*qualname, &*filename);
                Definition::Frame { id, name, qualname, filename, line, first_line }.encode(out);
            }
            Definition::FrameOrigin { frame, position, name, filename, line } => {
                let [name, _, filename] = self.frame(name, name, filename);
                Definition::FrameOrigin { frame, position, name: &name, filename: &filename, line }.encode(out);
            }
            Definition::Context { id, node, forward, module } => {
                Definition::Context { id, node: &self.texts.node(node), forward, module }.encode(out);
            }
            Definition::NnCall { id, caller, object, class } => {
                Definition::NnCall { id, caller, object, class: &self.class(class) }.encode(out);
            }
            Definition::NnName { object, seq, class, name } => {
                let (class, name) = (self.class(class), self.texts.name(name));
                Definition::NnName { object, seq, class: &class, name: &name }.encode(out);
            }
            Definition::TensorName { address, seq, kind, name, shape } => {
                let mut new = self.texts.name(name);
                if kind == TensorKind::Buffer && is_cache_name(name) != is_cache_name(&new) {
                    let last = name.rsplit('.').next().unwrap_or(name);
                    let path = new.rsplit_once('.').map_or(String::new(), |(path, _)| format!("{path}."));
                    new = format!("{path}{last}");
                }
                Definition::TensorName { address, seq, kind, name: &new, shape }.encode(out);
            }
            Definition::Label { id, origin, text } => {
                Definition::Label { id, origin, text: &self.texts.name(text) }.encode(out);
            }
            // The page with the objects is not part of a redacted run.
            Definition::Cycle { address, seq, file: _, text } => {
                Definition::Cycle { address, seq, file: "", text: &self.texts.name(text) }.encode(out);
            }
            Definition::Holder { address, seq, path, shape } => {
                let end = if path.ends_with(GRAPH_HOLDER) { GRAPH_HOLDER } else { "" };
                let path = self.texts.name(path.strip_suffix(end).unwrap_or(path)) + end;
                Definition::Holder { address, seq, path: &path, shape }.encode(out);
            }
            Definition::Module { id, path, build_id } => {
                let new = self.texts.path(path);
                // The build id of the program's own code would identify it.
                let build_id = if public::is_known_object(path) { build_id } else { "" };
                Definition::Module { id, path: &new, build_id }.encode(out);
            }
            Definition::Thread { id, tid, name } => {
                Definition::Thread { id, tid, name: &self.texts.thread(name) }.encode(out);
            }
            Definition::Device { ordinal, name, total, used_before, pci: _ } => {
                Definition::Device { ordinal, name, total, used_before, pci: "" }.encode(out);
            }
            Definition::EngineAttribute { path, value } => {
                let is_number = matches!(value, "True" | "False") || value.parse::<f64>().is_ok();
                let value = if is_number { value.to_owned() } else { self.texts.name(value) };
                Definition::EngineAttribute { path, value: &value }.encode(out);
            }
            Definition::Notice { topic, text, status } => {
                Definition::Notice { topic, text: &self.texts.sentence(text), status }.encode(out);
            }
            // The state that such a trace has in its definitions is in a file beside the copy.
            Definition::PackedRotation { rotation, .. } => Definition::Rotation { rotation }.encode(out),
            Definition::PackedBlock { .. } => {}
            Definition::Stack { .. }
            | Definition::Pool { .. }
            | Definition::NativeFrame { .. }
            | Definition::CacheUse { .. }
            | Definition::HolderScan { .. }
            | Definition::Rotation { .. }
            | Definition::Rank { .. } => {
                definition.encode(out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_holders_keep_their_structure() {
        let mut redactor = Redactor::new([3; KEY_BYTES]);
        let path = "__main__.acme_trainer.log['alice'][37] (frame acme_step): loss (its autograd graph)";
        let mut out = Vec::new();
        redactor.definition(&Definition::Holder { address: 1, seq: 2, path, shape: "" }, &mut out);
        let text = String::from_utf8_lossy(&out);
        assert!(!text.contains("acme") && !text.contains("alice"), "{text}");
        for part in ["__main__.", "['", "'][37] (frame ", "): ", " (its autograd graph)"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn rules_say_the_same_about_a_redacted_frame() {
        let mut redactor = Redactor::new([3; KEY_BYTES]);
        for (name, qualname, filename) in [
            ("forward", "AcmeModel.forward", "/home/alice/acme/model.py"),
            ("forward", "AcmeAttention.forward", "/home/alice/acme/model.py"),
            ("compute", "AcmeModel.compute", "/home/alice/acme/attn.py"),
            ("zero_grad", "AcmeOpt.zero_grad", "/home/alice/acme_optim/adam.py"),
            ("__init__", "KVCacheOfAcme.__init__", "/home/alice/acme/cache.py"),
            ("step", "step", "/home/alice/acme/torch/optim/adam.py"),
            ("evaluate_acme", "evaluate_acme", "/home/alice/acme/model.py"),
            ("acme_training", "AcmeModel.acme_training", "/home/alice/acme/model.py"),
        ] {
            let facts = |name: &str, qualname: &str, filename: &str| {
                let (name, qualname, filename) = (name.into(), qualname.into(), filename.into());
                FrameFacts::of(&Frame { name, qualname, filename, ..Frame::default() })
            };
            let [new_name, new_qualname, new_filename] = redactor.frame(name, qualname, filename);
            assert_eq!(facts(&new_name, &new_qualname, &new_filename), facts(name, qualname, filename), "{qualname}");
            assert!(!new_filename.contains("alice"), "{new_filename}");
            assert!(!new_name.to_lowercase().contains("acme"), "{new_name}");
        }
        let [name, qualname, filename] = redactor.frame("compute", "AcmeModel.compute", "/home/alice/acme/model.py");
        for text in [name, qualname, filename] {
            assert!(!["compute", "Acme", "acme", "alice", "model"].iter().any(|word| text.contains(word)), "{text}");
        }
        assert!(redactor.class("AcmeDropoutLayer").ends_with("Dropout"));
        assert!(!redactor.class("AcmeLayer").ends_with("Dropout") && redactor.class("Sequential") == "Sequential");
        let linear = "/home/alice/env/lib/python3.12/site-packages/torch/nn/modules/linear.py";
        let [name, qualname, filename] = redactor.frame("forward", "Linear.forward", linear);
        assert_eq!(
            (&*name, &*qualname, &*filename),
            ("forward", "Linear.forward", "/env/site-packages/torch/nn/modules/linear.py")
        );
    }
}
