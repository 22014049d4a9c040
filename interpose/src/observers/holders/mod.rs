//! Who holds it: the Python path that keeps each tensor alive (`--holders`), for example `__main__.history[37]`.
//!
//! - [`requests`]: when the program's objects are searched.
//! - [`search`]: the breadth-first search over references, from the global variables and the frames.
//! - [`labels`]: how one object refers to another, read only for the paths that lead to tensors.
//! - [`graph`]: the memory that autograd graphs hold.
//! - [`paths`]: the paths of the tensors' memory.
//! - [`maps`]: maps that need no system call.
//! - [`reported`]: which paths are new.
//!
//! Constraints: a search runs no Python code and keeps no object. It creates no object that outlives it, and changes a
//! reference count only for the duration of a read. It needs the GIL throughout.
//!
//! A search visits references as the garbage collector does (`tp_traverse`), so weak references hold nothing. It begins
//! with the global variables of `__main__`, then the local variables of all frames, then the other modules. The first
//! path found is the shortest one of the first of these two groups that reaches the object. Keys of dictionaries come
//! last.

mod graph;
mod labels;
mod maps;
mod paths;
mod reported;
pub(crate) mod requests;
mod search;
