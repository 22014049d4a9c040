//! Newtypes for every number that crosses a crate border.
//!
//! All ids are dense, start at 1 and are unique within one traced process; 0 means "none". They are defined by
//! [`crate::definition::Definition`] records, which may arrive after the first event that uses them.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// "No such thing": no stack was taken, no context applies.
            pub const NONE: $name = $name(0);

            /// Whether this is [`Self::NONE`].
            #[inline]
            pub const fn is_none(self) -> bool {
                self.0 == 0
            }

            /// The id as an index into a table whose entry 0 stands for "none".
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id! {
    /// A node of the prefix tree of call stacks: the stack from the outermost frame down to this node's frame.
    StackId
}
id! {
    /// One line of one function: what a traceback prints for a frame.
    FrameId
}
id! {
    /// What autograd was doing: a node type and the forward stack that made the node.
    ContextId
}
id! {
    /// A loaded object (shared library or executable) of the traced process.
    ModuleId
}
id! {
    /// A thread of the traced process, numbered in the order in which threads first recorded something.
    ThreadId
}
