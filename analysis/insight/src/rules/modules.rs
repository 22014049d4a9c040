//! Modules of PyTorch that stand for others: containers and wrappers.

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
