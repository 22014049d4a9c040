//! Assigns instructions to source lines by the object's debug information. An inlined instruction counts for the
//! function that it was written in. Inlined code of Rust's standard library counts for the line of ours that uses it.

use std::collections::{BTreeMap, BTreeSet};

use addr2line::gimli::{self, EndianSlice, LittleEndian, SectionId};
use addr2line::{Context, LookupResult};
use anyhow::{Result, anyhow};
use object::{Object, ObjectSection};

use crate::callgrind::{Cost, Profile};

/// Instruction counts by source position.
#[derive(Default, Debug)]
pub(crate) struct Sources {
    /// By function and its file. `own` counts the function alone, `inclusive` also the code inlined into it.
    pub(crate) functions: BTreeMap<String, Cost>,
    /// By function, file and line.
    pub(crate) lines: BTreeMap<String, i64>,
}

impl Sources {
    /// Reads the debug information of the profile's object. Fails when the object has none or cannot be read.
    pub(crate) fn of(profile: &Profile) -> Result<Sources> {
        let problem = |e: &dyn std::fmt::Display| anyhow!("cannot read debug information of {}: {e}", profile.object);
        let bytes = std::fs::read(&profile.object).map_err(|e| problem(&e))?;
        let file = object::File::parse(&*bytes).map_err(|e| problem(&e))?;
        let section = |id: SectionId| -> Result<_, gimli::Error> {
            let data = file.section_by_name(id.name()).and_then(|s| s.data().ok());
            Ok(EndianSlice::new(data.unwrap_or_default(), LittleEndian))
        };
        let context = gimli::Dwarf::load(section).and_then(Context::from_dwarf).map_err(|e| problem(&e))?;
        let mut sources = Sources::default();
        for (address, count) in profile.instructions.iter().filter(|(_, count)| **count != 0) {
            let LookupResult::Output(frames) = context.find_frames(*address) else {
                return Err(problem(&"it is in several files"));
            };
            let mut frames = frames.map_err(|e| problem(&e))?;
            let mut chain = Vec::new();
            while let Some(frame) = frames.next().map_err(|e| problem(&e))? {
                let name = frame.function.as_ref().and_then(|f| f.demangle().ok());
                let (file, line) = frame.location.map_or(("?", 0), |l| (l.file.unwrap_or("?"), l.line.unwrap_or(0)));
                chain.push((format!("{}  {}", name.as_deref().map_or("?", plain), short(file)), line));
            }
            let innermost = chain.iter().position(|(function, _)| !is_rusts(function)).unwrap_or(0);
            let mut seen = BTreeSet::new();
            for (at, (function, line)) in chain.iter().enumerate().skip(innermost) {
                if at == innermost {
                    *sources.lines.entry(format!("{function}:{line}")).or_default() += count;
                }
                if (at == innermost || !is_rusts(function)) && seen.insert(function) {
                    let cost = sources.functions.entry(function.clone()).or_default();
                    cost.inclusive += count;
                    cost.own += if at == innermost { *count } else { 0 };
                }
            }
        }
        Ok(sources)
    }
}

/// Whether a function belongs to Rust's standard library.
fn is_rusts(function: &str) -> bool {
    function.contains("  library/")
}

/// A function's name without its type parameters.
fn plain(name: &str) -> &str {
    if name.starts_with('<') { name } else { name.split('<').next().unwrap_or(name) }
}

/// A source path, starting at its crate's folder.
fn short(file: &str) -> &str {
    let from = ["/interpose/", "/trace/", "/library/"].iter().find_map(|part| file.rfind(part));
    from.map_or(file, |at| &file[at + 1..])
}
