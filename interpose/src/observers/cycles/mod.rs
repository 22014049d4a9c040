//! `--cycles`: shows which objects held tensors' memory until the cyclic garbage collector ran. It runs Python code in
//! the program, so only on request.
//!
//! `torch.utils.viz._cycles` shows such objects too, but its `observe_tensor_cycles` has side effects. It starts
//! PyTorch's own memory recording, empties `gc.garbage`, drops the program's debug flags and sets a profile function.
//! It runs two full collections after each collection and sees only CUDA tensors. So only its `create_graph` and
//! `to_html` are used.
//!
//! Our function in `gc.callbacks` sets `gc.DEBUG_SAVEALL` while the collector runs. The collector then appends its
//! findings to `gc.garbage` instead of freeing them. The function removes them from there before any other callback
//! runs. It finds the cycles that hold tensors ([`graph`]) and renders them ([`show`]).
//!
//! Before the collection ends, it frees the objects in the way the collector would. So the memory is freed in the same
//! collection, and no further one runs. First it verifies that the objects are still garbage: each has only the
//! references that the others hold. If Python code has stored one of them meanwhile, all are left to the next
//! collection.
//!
//! A pending call (as for [`super::names`]) registers the function at the first free of a tensor after PyTorch was
//! imported.

pub(crate) mod callback;
mod garbage;
mod graph;
mod show;
mod torch_classes;
