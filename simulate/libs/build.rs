//! Calls inside the library must not reach a preloaded library of the same names, as in NVIDIA's own libraries. With a
//! build id, native stacks can name its functions.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic,--build-id=sha1");
    println!("cargo::rerun-if-changed=build.rs");
}
