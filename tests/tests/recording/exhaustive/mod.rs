//! What needs other environments than the default one.

mod versions;
