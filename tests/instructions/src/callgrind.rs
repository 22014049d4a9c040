//! Parses callgrind's output file and keeps the costs of one object (shared library).
//!
//! The format is documented at valgrind.org/docs/manual/cl-format.html. The file is written with `--dump-instr=yes
//! --compress-strings=no --compress-pos=no`, so each line spells out its names. A cost line has an address (as in the
//! object's file), a source line and a cost. It belongs to the object and function named before it. The cost line after
//! `calls=` is the inclusive cost of those calls, and belongs to the callee.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// The functions and instructions of one object, and its calls into other objects.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Profile {
    /// The object's path.
    pub(crate) object: String,
    /// Costs by function name.
    pub(crate) functions: BTreeMap<String, Cost>,
    /// The execution count of each instruction, by its address in the object file.
    pub(crate) instructions: BTreeMap<u64, i64>,
    /// Calls into other objects, by (file name of the object, function).
    pub(crate) calls_out: BTreeMap<(String, String), Calls>,
}

/// The instruction counts of a function.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Cost {
    /// Executed in the function itself.
    pub(crate) own: i64,
    /// Executed in the function and in everything that it calls, in every object.
    pub(crate) inclusive: i64,
}

/// The calls of one function in another object.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Calls {
    /// The number of calls.
    pub(crate) count: i64,
    /// Instructions executed in them.
    pub(crate) cost: i64,
}

impl Profile {
    /// Parses a file's text. `ours` decides by file name which object to keep. Fails when the text is not in
    /// callgrind's format.
    pub(crate) fn parse(text: &str, ours: impl Fn(&str) -> bool) -> Result<Profile> {
        let mut profile = Profile::default();
        let (mut object, mut function) = (String::new(), String::new());
        let mut callee = Callee::default();
        let mut calls = None;
        for header in ["positions: instr line", "events: Ir"] {
            ensure!(text.lines().any(|l| l == header), "callgrind wrote no {header:?}");
        }
        for line in text.lines().skip_while(|l| !l.starts_with("summary:")) {
            if let Some((key, value)) = line.split_once('=') {
                match key {
                    "ob" => value.clone_into(&mut object),
                    "fn" => value.clone_into(&mut function),
                    "cob" => callee.object = Some(value.to_owned()),
                    "cfn" => value.clone_into(&mut callee.function),
                    "calls" => {
                        let count = value.split(' ').next().unwrap_or_default();
                        calls = Some(count.parse().with_context(|| format!("no number of calls: {line}"))?);
                    }
                    _ => {}
                }
                continue;
            }
            if !line.starts_with("0x") {
                continue;
            }
            let (address, cost) =
                cost_of(line).with_context(|| format!("not an address, a line and a cost: {line}"))?;
            let target = calls.take().map(|count: i64| (count, std::mem::take(&mut callee)));
            if !ours(file_name(&object)) {
                continue;
            }
            object.clone_into(&mut profile.object);
            let entry = profile.functions.entry(function.clone()).or_default();
            entry.inclusive += cost;
            match target {
                None => {
                    entry.own += cost;
                    *profile.instructions.entry(address).or_default() += cost;
                }
                Some((count, Callee { object: Some(object), function })) if !ours(file_name(&object)) => {
                    let calls = profile.calls_out.entry((file_name(&object).to_owned(), function)).or_default();
                    calls.count += count;
                    calls.cost += cost;
                }
                Some(_) => {}
            }
        }
        Ok(profile)
    }

    /// The difference of this profile and `less`, count by count.
    pub(crate) fn minus(&self, less: &Profile) -> Profile {
        let mut rest = self.clone();
        for (name, cost) in &less.functions {
            let entry = rest.functions.entry(name.clone()).or_default();
            entry.own -= cost.own;
            entry.inclusive -= cost.inclusive;
        }
        for (address, count) in &less.instructions {
            *rest.instructions.entry(*address).or_default() -= count;
        }
        for (callee, calls) in &less.calls_out {
            let entry = rest.calls_out.entry(callee.clone()).or_default();
            entry.count -= calls.count;
            entry.cost -= calls.cost;
        }
        rest
    }

    /// The number of instructions executed in the object.
    pub(crate) fn own(&self) -> i64 {
        self.functions.values().map(|c| c.own).sum()
    }

    /// The calls into the C library and the loader, summed.
    pub(crate) fn c_library(&self) -> Calls {
        let of_c = |(object, _): &(String, String)| {
            ["libc.so", "libc-", "ld-linux", "ld-2", "libpthread"].iter().any(|name| object.starts_with(name))
        };
        self.calls_out.iter().filter(|(callee, _)| of_c(callee)).fold(Calls::default(), |sum, (_, calls)| Calls {
            count: sum.count + calls.count,
            cost: sum.cost + calls.cost,
        })
    }
}

#[derive(Default)]
struct Callee {
    /// `None` means the caller's object.
    object: Option<String>,
    function: String,
}

/// Parses a cost line such as `0x170f0 111 2` into its address and cost.
fn cost_of(line: &str) -> Option<(u64, i64)> {
    let mut words = line.split(' ');
    let address = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    Some((address, words.nth(1)?.parse().ok()?))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\npositions: instr line\nevents: Ir\nsummary: 135\n\n\
        ob=/lib/libpython3.so\nfl=a.c\nfn=main\n0x1 1 10\ncob=/tmp/ours.so\ncfi=b.rs\ncfn=enter\n\
        calls=3 0x50 5\n0x2 2 100\n\n\
        ob=/tmp/ours.so\nfl=b.rs\nfn=enter\n0x50 5 30\nfi=inlined.rs\n0x51 70 20\nfe=b.rs\n0x52 6 4\ncfn=inner\n\
        calls=3 0x90 9\n0x53 7 40\n\
        cob=/lib/ld-linux-x86-64.so.2\ncfi=tls.c\ncfn=__tls_get_addr\ncalls=6 0x1 1\n0x54 7 6\n\n\
        fn=inner\n0x90 9 40\n\n\
        totals: 135\n";

    fn ours(object: &str) -> bool {
        object == "ours.so"
    }

    #[test]
    fn costs_belong_to_their_function_and_object() {
        let profile = Profile::parse(TEXT, ours).unwrap();
        assert_eq!(profile.functions["enter"], Cost { own: 54, inclusive: 100 });
        assert_eq!(profile.functions["inner"], Cost { own: 40, inclusive: 40 });
        assert_eq!(profile.functions.len(), 2, "Python's own functions are not ours");
        assert_eq!(profile.instructions, BTreeMap::from([(0x50, 30), (0x51, 20), (0x52, 4), (0x90, 40)]));
        assert_eq!(profile.object, "/tmp/ours.so");
        assert_eq!(profile.own(), 94);
        assert_eq!(profile.c_library(), Calls { count: 6, cost: 6 });
    }

    #[test]
    fn equal_costs_cancel_out() {
        let profile = Profile::parse(TEXT, ours).unwrap();
        let none = profile.minus(&profile);
        assert_eq!((none.own(), none.c_library()), (0, Calls::default()));
        assert_eq!(profile.minus(&Profile::default()), profile);
    }

    #[test]
    fn other_formats_are_refused() {
        let parse = |text: &str| Profile::parse(text, ours);
        assert!(parse("positions: instr line\nevents: Dr\nsummary: 1\n").is_err());
        assert!(parse("positions: line\nevents: Ir\nsummary: 1\n").is_err());
        assert!(parse("positions: instr line\nevents: Ir\nsummary: 1\n0x1 1 x\n").is_err());
    }
}
