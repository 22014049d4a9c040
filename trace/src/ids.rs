//! Newtypes for all numbers that crates exchange.
//!
//! All ids are dense, start at 1 and are unique within one traced process. 0 means "none".
//! [`crate::definition::Definition`] records define them, and may follow the first event that uses them.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// No value: no stack was captured, or no context applies.
            pub const NONE: $name = $name(0);

            /// Whether this is [`Self::NONE`].
            #[inline]
            pub const fn is_none(self) -> bool {
                self.0 == 0
            }

            /// The id as an index into a table whose entry 0 means "none".
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
    /// One line of one function, as a traceback prints it.
    FrameId
}
id! {
    /// An autograd node's type with its forward stack, or a call of an `nn.Module`.
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
