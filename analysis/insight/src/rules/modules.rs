//! Modules of PyTorch that stand for others: containers, wrappers and classes that it makes.

use memtrace_trace::file::Definitions;

/// Classes of PyTorch that say nothing about what is inside.
const CONTAINERS: &[&str] = &["Sequential", "ModuleList", "ModuleDict"];

/// The attributes in which wrappers of PyTorch keep the wrapped module: torch.compile, FullyShardedDataParallel,
/// checkpoint_wrapper.
const WRAPPED: &[&str] = &["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Whether modules of this class can contain anything.
pub fn is_container_class(class: &str) -> bool {
    CONTAINERS.contains(&class)
}

/// Whether a module of this name is what a wrapper wraps.
pub fn is_wrapped_module(component: &str) -> bool {
    WRAPPED.contains(&component)
}

/// Where `fully_shard` is, by PyTorch release.
pub(super) const FULLY_SHARD: &[&str] =
    &["torch/distributed/fsdp/_fully_shard/", "torch/distributed/_composable/fsdp/"];

/// The program's own names of its modules' classes.
#[derive(Clone, Copy, Debug)]
pub struct UserClasses {
    has_fully_shard: bool,
}

impl UserClasses {
    /// The classes of a recording.
    pub fn of(definitions: &Definitions) -> UserClasses {
        let is_fully_shard = |filename: &str| FULLY_SHARD.iter().any(|folder| filename.contains(folder));
        UserClasses { has_fully_shard: definitions.frames.iter().any(|frame| is_fully_shard(&frame.filename)) }
    }

    /// The class that the program defines. `fully_shard` gives a module of class `Block` a new class `FSDPBlock`.
    pub fn name(self, class: &str) -> &str {
        let own = class.strip_prefix("FSDP").filter(|own| own.starts_with(|c: char| c.is_alphabetic() || c == '_'));
        own.filter(|_| self.has_fully_shard).unwrap_or(class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::file::Frame;

    #[test]
    fn classes_of_fully_shard_have_the_names_of_the_program() {
        let mut definitions = Definitions::default();
        assert_eq!(UserClasses::of(&definitions).name("FSDPBlock"), "FSDPBlock", "a class of the program");
        let filename = "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_state.py".into();
        definitions.frames.push(Frame { filename, ..Frame::default() });
        let classes = UserClasses::of(&definitions);
        let names =
            ["FSDPBlock", "Block", "FSDP", "FullyShardedDataParallel"].map(|class| classes.name(class).to_owned());
        assert_eq!(names, ["Block", "Block", "FSDP", "FullyShardedDataParallel"]);
    }
}
