//! The C text of what is linked in beside the archives: stubs, the driver's table of names, the runtime's version.
//!
//! A stub returns 0 and is counted. That is enough nearly everywhere; but a function that tells a size, or makes
//! something the program then uses, must write its output, or the program goes on with garbage.

use std::fmt::Write as _;

/// What a stub writes: the argument's number (from 0) and the type of the 0, or a fresh handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// `*(int *)argument = 0`
    Int(usize),
    /// `*(size_t *)argument = 0`
    Size(usize),
    /// `*(void **)argument = a handle`
    Handle(usize),
}

/// Most integer arguments a stub passes over. Floating-point ones travel in other registers and are not counted.
const ARGUMENTS: usize = 20;

/// The outputs of a function, by its name.
pub(crate) fn outputs(_name: &str) -> Vec<Output> {
    Vec::new()
}

/// C text of the stubs. They need `simcuda_stub`, and `simcuda_handle` where a handle is made.
pub(crate) fn stubs<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let mut text = String::from("#include <stddef.h>\nvoid simcuda_stub(const char *);\nvoid *simcuda_handle(void);\n");
    for name in names {
        let outputs = outputs(name);
        let arguments = if outputs.is_empty() {
            "void".to_string()
        } else {
            (0..ARGUMENTS).map(|i| format!("void *a{i}")).collect::<Vec<_>>().join(", ")
        };
        let _ = write!(text, "long {name}({arguments}) {{ simcuda_stub(\"{name}\");");
        for output in outputs {
            let _ = match output {
                Output::Int(i) => write!(text, " if (a{i}) *(int *)a{i} = 0;"),
                Output::Size(i) => write!(text, " if (a{i}) *(size_t *)a{i} = 0;"),
                Output::Handle(i) => write!(text, " if (a{i}) *(void **)a{i} = simcuda_handle();"),
            };
        }
        text.push_str(" return 0; }\n");
    }
    text
}

/// C text of the table `cuGetProcAddress` searches.
pub(crate) fn entries<'a>(names: impl Iterator<Item = &'a String> + Clone) -> String {
    let mut text = String::from("#include <stddef.h>\n");
    for name in names.clone() {
        let _ = writeln!(text, "void {name}(void);");
    }
    text.push_str("const struct { const char *name; void (*address)(void); } simcuda_entries[] = {\n");
    for name in names.clone() {
        let _ = writeln!(text, "  {{\"{name}\", {name}}},");
    }
    let _ = writeln!(text, "}};\nconst size_t simcuda_entry_count = {};", names.count());
    text
}

/// C text of the runtime's version.
pub(crate) fn runtime_version(version: u32) -> String {
    format!("const int simcuda_cudart_version = {version};\n")
}
