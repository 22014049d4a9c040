//! `--cycles`: shows which objects held tensors' memory until the cyclic garbage collector ran. It adds a function to
//! `gc.callbacks`, which the program can see, so only on request. It runs none of the program's code.
//!
//! `torch.utils.viz._cycles` shows such objects too, but `observe_tensor_cycles` has side effects. It starts PyTorch's
//! own memory recording, empties `gc.garbage`, drops the program's debug flags and sets a profile function. It runs two
//! full collections after each collection and sees only CUDA tensors. `create_graph` calls the program's `repr` and
//! properties, and the page of `to_html` loads a script from the network. So nothing of it is used.
//!
//! Our function in `gc.callbacks` sets `gc.DEBUG_SAVEALL` while the collector runs. The collector then appends its
//! findings to `gc.garbage` instead of freeing them. The function removes them from there before any other callback
//! runs. It finds the cycles that hold tensors ([`graph`]), describes them
//! ([`show`]) and renders them ([`page`]).
//!
//! Before the collection ends, it frees the objects in the way the collector would. So the memory is freed in the same
//! collection, and no further one runs. First it verifies that the objects are still garbage: each has only the
//! references that the others hold. If another thread has stored one of them meanwhile, all are left to the next
//! collection.
//!
//! A pending call (as for [`super::names`]) registers the function at the first free of a tensor after PyTorch was
//! imported.

pub(crate) mod callback;
mod garbage;
mod graph;
mod page;
mod show;
mod torch_classes;
