//! Calls inside the library must not reach a preloaded library of the same names, as in NVIDIA's own libraries.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
