//! Tests that need other environments than the default one.

mod versions;
