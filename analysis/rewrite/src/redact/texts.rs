//! The replacement of names, paths and texts. Their structure stays: dots, numbers, extensions, the depth of a path.

use std::collections::HashSet;

use memtrace_insight::rules::library_name;

use super::pseudonyms::Pseudonyms;
use super::public;

/// The folder in which the packages of a redacted recording lie.
const ENVIRONMENT: &str = "/env";
/// Folders of the system, whose libraries everybody has.
const SYSTEM: [&str; 6] = ["/usr/lib/", "/usr/lib64/", "/lib/", "/lib64/", "/usr/local/cuda", "/opt/nvidia/"];
/// Names of threads that PyTorch and Python give.
const THREADS: [&str; 6] = ["python", "pt_", "cuda", "nccl", "MainThread", "ThreadPoolExec"];

/// Replaces names.
#[derive(Debug)]
pub(super) struct Texts {
    pseudonyms: Pseudonyms,
    /// Words in the frames of public packages.
    seen_in_packages: HashSet<Box<str>>,
}

impl Texts {
    pub(super) fn new(key: [u8; 32]) -> Texts {
        Texts { pseudonyms: Pseudonyms::new(key), seen_in_packages: HashSet::new() }
    }

    /// Adds the words of a name of a public package. They stay wherever they occur.
    pub(super) fn add_public(&mut self, name: &str) {
        for word in words(name).filter(|word| is_name(word)) {
            if !self.seen_in_packages.contains(word) {
                self.seen_in_packages.insert(word.into());
            }
        }
    }

    fn is_public(&self, word: &str) -> bool {
        public::is_word(word) || self.seen_in_packages.contains(word)
    }

    /// Whether the word has got a pseudonym.
    fn is_replaced(&self, word: &str) -> bool {
        self.pseudonyms.has(word.trim_end_matches(|c: char| c.is_ascii_digit()))
    }

    /// One word. Digits at its end stay: `layer1`, `layer2`.
    pub(super) fn word(&mut self, word: &str) -> String {
        if self.is_public(word) {
            return word.to_owned();
        }
        let stem = word.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &word[stem.len()..];
        if self.is_public(stem) { word.to_owned() } else { format!("{}{digits}", self.pseudonyms.of(stem)) }
    }

    /// Every word of a name: `blocks.0.attn.weight`, `Block.forward.<locals>.<lambda>`, `step 3`.
    pub(super) fn name(&mut self, name: &str) -> String {
        let parts: Vec<&str> = words(name).collect();
        parts.into_iter().map(|part| if is_name(part) { self.word(part) } else { part.to_owned() }).collect()
    }

    /// The type of an autograd node. `AddmmBackward0`, with a number, is one of PyTorch's own; `MyFunctionBackward` is
    /// the program's.
    pub(super) fn node(&mut self, node: &str) -> String {
        let stem = node.trim_end_matches(|c: char| c.is_ascii_digit());
        if stem.len() < node.len() && stem.ends_with("Backward") && !stem.contains(|c: char| !c.is_alphanumeric()) {
            return node.to_owned();
        }
        match node.strip_suffix("Backward") {
            Some(function) if !self.is_public(node) => self.name(function) + "Backward",
            _ => self.name(node),
        }
    }

    /// A path of a source file, an object or a folder.
    pub(super) fn path(&mut self, path: &str) -> String {
        for packages in ["site-packages/", "dist-packages/"] {
            let Some(at) = path.rfind(packages) else { continue };
            let inside = &path[at + packages.len()..];
            let package = inside.split('/').next().unwrap_or_default();
            let name = package.split(['.', '-']).next().unwrap_or_default();
            let inside = if public::is_package(name) { inside.to_owned() } else { self.components(inside) };
            return format!("{ENVIRONMENT}/{packages}{inside}");
        }
        for library in ["/lib/python3", "/lib64/python3"] {
            if let Some(at) = path.find(library) {
                return format!("{ENVIRONMENT}{}", &path[at..]);
            }
        }
        if let Some(at) = path.find("/torchinductor_") {
            // The next component has the name of the user. The file's name is a hash of its content.
            let rest = path[at + 1..].split_once('/').map_or("", |(_, rest)| rest);
            return format!("/tmp/torchinductor/{rest}");
        }
        if path.starts_with("torch/") || SYSTEM.iter().any(|system| path.starts_with(system)) {
            return path.to_owned();
        }
        if let Some(inside) = path.strip_prefix('<') {
            let kind = inside.split([' ', '>', '-']).next().unwrap_or_default();
            let known = ["frozen", "string", "stdin", "ipython", "eval_with_key", "module"];
            return if known.contains(&kind) { path.to_owned() } else { self.name(path) };
        }
        let redacted = self.components(path);
        // The owner of memory is known by the name of its library.
        match library_name(path) {
            name if name == library_name(&redacted) || !file_name(path).contains(".so") || path.ends_with(name) => {
                redacted
            }
            _ => format!("{}/{}", parent(&redacted), file_name(path)),
        }
    }

    /// A path with its last components as they are.
    pub(super) fn path_with_end(&mut self, path: &str, components: usize) -> String {
        let at = path.rmatch_indices('/').nth(components - 1).map_or(0, |(at, _)| at);
        if at == 0 { path.to_owned() } else { format!("{}{}", self.components(&path[..at]), &path[at..]) }
    }

    /// The components of a path, each a pseudonym. Extensions stay.
    fn components(&mut self, path: &str) -> String {
        let redact = |texts: &mut Texts, component: &str| {
            let (stem, extension) = match component.find(".so").or_else(|| component.rfind('.').filter(|at| *at > 0)) {
                Some(at) if component[at + 1..].chars().all(|c| c.is_ascii_alphanumeric() || c == '.') => {
                    component.split_at(at)
                }
                _ => (component, ""),
            };
            let extension = if extension.len() <= 12 { extension } else { "" };
            let is_special = stem.starts_with("__") && public::is_word(stem);
            if is_special || !stem.chars().any(char::is_alphabetic) || public::is_program(component) {
                return component.to_owned();
            }
            format!("{}{extension}", texts.pseudonyms.of(stem))
        };
        path.split('/').map(|component| redact(self, component)).collect::<Vec<_>>().join("/")
    }

    /// The name of a thread.
    pub(super) fn thread(&mut self, name: &str) -> String {
        let is_known = THREADS.iter().any(|known| name.starts_with(known)) && !self.pseudonyms.has(name);
        if is_known { name.to_owned() } else { self.name(name) }
    }

    /// The name of a host.
    pub(super) fn host(&mut self, host: &str) -> String {
        self.pseudonyms.of(host).into()
    }

    /// One argument of a command line.
    pub(super) fn argument(&mut self, argument: &str, is_program: bool) -> String {
        let name = file_name(argument);
        if is_program && public::is_program(name) {
            return name.to_owned();
        }
        match argument.split_once('=') {
            Some((option, value)) if option.starts_with("--") => {
                format!("{}={}", self.argument(option, false), self.argument(value, false))
            }
            _ if argument.contains('/') || is_program => self.path(argument),
            _ => {
                let dashes = argument.len() - argument.trim_start_matches('-').len();
                let (dashes, rest) = argument.split_at(dashes);
                if rest.is_empty() { argument.to_owned() } else { format!("{dashes}{}", self.pseudonyms.of(rest)) }
            }
        }
    }

    /// A sentence of memtrace. Paths in it are replaced, and the words that were replaced elsewhere.
    pub(super) fn sentence(&mut self, text: &str) -> String {
        let mut out = Vec::new();
        for token in text.split(' ') {
            let bare =
                token.trim_matches(|c: char| !c.is_alphanumeric() && !matches!(c, '/' | '<' | '>' | '_' | '.' | '-'));
            let bare = bare.trim_end_matches(['.', '-']);
            let new = if bare.contains('/') && bare.len() > 1 {
                token.replacen(bare, &self.path(bare), 1)
            } else {
                let parts: Vec<&str> = words(token).collect();
                parts
                    .into_iter()
                    .map(|word| if self.is_replaced(word) { self.word(word) } else { word.to_owned() })
                    .collect()
            };
            out.push(new);
        }
        out.join(" ")
    }
}

/// The last component of a path.
fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Whether a part of a name is a word, and not what separates words.
fn is_name(part: &str) -> bool {
    part.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The words of a name and the separators between them, in order.
fn words(name: &str) -> impl Iterator<Item = &str> {
    let mut rest = name;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let is_part_of_word = |c: char| c.is_alphanumeric() || c == '_';
        let kind = is_part_of_word(first);
        let end = rest.find(|c: char| is_part_of_word(c) != kind).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        Some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> Texts {
        let mut texts = Texts::new([7; 32]);
        texts.add_public("ConvolutionHelper.apply_to");
        texts
    }

    #[test]
    fn names_keep_their_structure() {
        let mut texts = texts();
        let name = texts.name("secret_net.layer1.0.weight");
        let parts: Vec<&str> = name.split('.').collect();
        assert!(parts[0].starts_with('x') && parts[1].starts_with('x') && parts[1].ends_with('1'), "{name}");
        assert_eq!(parts[2..], ["0", "weight"]);
        let [first, second] = ["layer1", "layer2"].map(|name| texts.name(name));
        assert_eq!(first.trim_end_matches('1'), second.trim_end_matches('2'));
        assert_eq!(texts.name("Adam.exp_avg of weight"), "Adam.exp_avg of weight");
        assert_eq!(texts.name("ConvolutionHelper.<locals>.<lambda>"), "ConvolutionHelper.<locals>.<lambda>");
        let epochs = [texts.name("epoch of alice 3"), texts.name("epoch of alice 4")];
        assert_eq!(epochs[0].replace('3', "4"), epochs[1]);
        assert!(!epochs[0].contains("alice"));
    }

    #[test]
    fn nodes_of_pytorch_stay() {
        let mut texts = texts();
        for node in ["AddmmBackward0", "AccumulateGrad", "CheckpointFunctionBackward", "torch::autograd::CopySlices"] {
            assert_eq!(texts.node(node), node);
        }
        let own = texts.node("SecretSauceBackward");
        assert!(own.ends_with("Backward") && !own.contains("Secret"), "{own}");
        assert!(!texts.node("CppNode<SecretFn>").contains("Secret"));
        assert!(!texts.node("Secret_Backward0").contains("Secret"), "no name that PyTorch generates");
    }

    #[test]
    fn paths_keep_what_is_public() {
        let mut texts = texts();
        let site = |file: &str| format!("/home/alice/.venv/lib/python3.12/site-packages/{file}");
        assert_eq!(texts.path(&site("torch/nn/modules/linear.py")), "/env/site-packages/torch/nn/modules/linear.py");
        let own = texts.path(&site("acme_secrets/model.py"));
        assert!(own.starts_with("/env/site-packages/x") && own.ends_with(".py") && !own.contains("acme"), "{own}");
        assert_eq!(texts.path("/home/alice/.pyenv/lib/python3.12/threading.py"), "/env/lib/python3.12/threading.py");
        let own = texts.path("/home/alice/project/train.py");
        assert_eq!(own.matches('/').count(), 4, "{own}");
        assert!(own.ends_with(".py") && !own.contains("alice") && !own.contains("project"), "{own}");
        let other = texts.path("/home/alice/project/model.py");
        assert_eq!(parent(&own), parent(&other), "{own} {other}");
        assert_eq!(texts.path("/tmp/torchinductor_alice/ab/cabc.py"), "/tmp/torchinductor/ab/cabc.py");
        assert_eq!(texts.path("/usr/lib/x86_64-linux-gnu/libc.so.6"), "/usr/lib/x86_64-linux-gnu/libc.so.6");
        assert_eq!(texts.path("<frozen importlib._bootstrap>"), "<frozen importlib._bootstrap>");
        let nccl = texts.path("/home/alice/nccl/build/libnccl.so.2");
        assert!(nccl.ends_with("/libnccl.so.2") && !nccl.contains("alice"), "{nccl}");
        let own = texts.path("/home/alice/acme.cpython-312-x86_64-linux-gnu.so");
        assert!(!own.contains("acme") && !own.contains("alice"), "{own}");
    }

    #[test]
    fn arguments_are_replaced() {
        let mut texts = texts();
        assert_eq!(texts.argument("/home/alice/bin/python3.12", true), "python3.12");
        let option = texts.argument("--secret-rate=0.125", false);
        assert!(option.starts_with("--x") && !option.contains("secret") && !option.contains("0.125"), "{option}");
        for argument in ["train.py", "alice@example.org", "64", "-x7"] {
            assert_ne!(texts.argument(argument, false), argument);
        }
        assert_eq!(texts.argument("--", false), "--");
    }

    #[test]
    fn sentences_keep_their_words() {
        let mut texts = texts();
        texts.name("SecretModel");
        assert_eq!(texts.sentence("attached by vtable slot 44"), "attached by vtable slot 44");
        let text = texts.sentence("cannot read /home/alice/x.so: it is of SecretModel, not verified.");
        assert!(!text.contains("alice") && !text.contains("SecretModel") && text.contains("not verified."), "{text}");
    }
}
