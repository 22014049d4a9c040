//! What callgrind counted: its output file, read for one object.
//!
//! The file (valgrind.org/docs/manual/cl-format.html) is written with `--compress-strings=no --compress-pos=no`: names stand
//! where they are used, lines are absolute. A cost is attributed to the object, function and source line that stand before it;
//! the line after `calls=` is the inclusive cost of those calls, and belongs to the callee.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// Functions and lines of one object, and what it calls in others.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Profile {
    /// By function.
    pub(crate) functions: BTreeMap<String, Cost>,
    /// Instructions by function, source file and line: what was inlined is where it was written.
    pub(crate) lines: BTreeMap<(String, String, u64), i64>,
    /// Calls into other objects, by (object's file name, function).
    pub(crate) calls_out: BTreeMap<(String, String), Calls>,
}

/// Instructions of a function.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Cost {
    /// In the function itself.
    pub(crate) own: i64,
    /// With everything it calls, in whatever object.
    pub(crate) inclusive: i64,
}

/// Calls of one foreign function.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Calls {
    /// How many.
    pub(crate) count: i64,
    /// Instructions in them.
    pub(crate) cost: i64,
}

impl Profile {
    /// Reads a file's text; `ours` says which object (by file name) is meant.
    pub(crate) fn parse(text: &str, ours: impl Fn(&str) -> bool) -> Result<Profile> {
        let mut profile = Profile::default();
        let (mut object, mut function, mut file, mut home) =
            (String::new(), String::new(), String::new(), String::new());
        let mut callee = Callee::default();
        let mut calls = None;
        ensure!(text.lines().any(|l| l == "events: Ir"), "callgrind counted something else than instructions");
        for line in text.lines().skip_while(|l| !l.starts_with("summary:")) {
            if let Some((key, value)) = line.split_once('=') {
                match key {
                    "ob" => object = file_name(value).to_owned(),
                    "fl" => (file, home) = (value.to_owned(), value.to_owned()),
                    "fi" | "fe" => file = value.to_owned(),
                    "fn" => (function, file) = (value.to_owned(), home.clone()),
                    "cob" => callee.object = Some(file_name(value).to_owned()),
                    "cfn" => callee.function = value.to_owned(),
                    "calls" => {
                        let count = value.split(' ').next().unwrap_or_default();
                        calls = Some(count.parse().with_context(|| format!("no number of calls: {line}"))?);
                    }
                    _ => {}
                }
                continue;
            }
            if !line.starts_with(|c: char| c.is_ascii_digit()) {
                continue;
            }
            let numbers = line.split_once(' ').and_then(|(at, cost)| Some((at.parse().ok()?, cost.parse().ok()?)));
            let (at, cost): (u64, i64) = numbers.with_context(|| format!("not a position and a cost: {line}"))?;
            let target = calls.take().map(|count: i64| (count, std::mem::take(&mut callee)));
            if !ours(&object) {
                continue;
            }
            let entry = profile.functions.entry(function.clone()).or_default();
            entry.inclusive += cost;
            match target {
                None => {
                    entry.own += cost;
                    *profile.lines.entry((function.clone(), file.clone(), at)).or_default() += cost;
                }
                Some((count, Callee { object: Some(object), function })) if !ours(&object) => {
                    let calls = profile.calls_out.entry((object, function)).or_default();
                    calls.count += count;
                    calls.cost += cost;
                }
                Some(_) => {}
            }
        }
        Ok(profile)
    }

    /// What this has more than `less`.
    pub(crate) fn minus(&self, less: &Profile) -> Profile {
        let mut rest = self.clone();
        for (name, cost) in &less.functions {
            let entry = rest.functions.entry(name.clone()).or_default();
            entry.own -= cost.own;
            entry.inclusive -= cost.inclusive;
        }
        for (place, cost) in &less.lines {
            *rest.lines.entry(place.clone()).or_default() -= cost;
        }
        for (callee, calls) in &less.calls_out {
            let entry = rest.calls_out.entry(callee.clone()).or_default();
            entry.count -= calls.count;
            entry.cost -= calls.cost;
        }
        rest
    }

    /// Instructions in the object.
    pub(crate) fn own(&self) -> i64 {
        self.functions.values().map(|c| c.own).sum()
    }

    /// Calls of the C library and the loader.
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
    /// `None`: the caller's.
    object: Option<String>,
    function: String,
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\nevents: Ir\nsummary: 135\n\n\
        ob=/lib/libpython3.so\nfl=a.c\nfn=main\n1 10\ncob=/tmp/ours.so\ncfi=b.rs\ncfn=enter\ncalls=3 5\n2 100\n\n\
        ob=/tmp/ours.so\nfl=b.rs\nfn=enter\n5 30\nfi=inlined.rs\n70 20\nfe=b.rs\n6 4\ncfn=inner\ncalls=3 9\n7 40\n\
        cob=/lib/ld-linux-x86-64.so.2\ncfi=tls.c\ncfn=__tls_get_addr\ncalls=6 1\n7 6\n\nfn=inner\n9 40\n\ntotals: 135\n";

    fn ours(object: &str) -> bool {
        object == "ours.so"
    }

    #[test]
    fn costs_belong_to_their_function_line_and_object() {
        let profile = Profile::parse(TEXT, ours).unwrap();
        assert_eq!(profile.functions["enter"], Cost { own: 54, inclusive: 100 });
        assert_eq!(profile.functions["inner"], Cost { own: 40, inclusive: 40 });
        assert_eq!(profile.functions.len(), 2, "Python's own functions are not ours");
        assert_eq!(profile.lines[&("enter".into(), "inlined.rs".into(), 70)], 20);
        assert_eq!(profile.lines[&("inner".into(), "b.rs".into(), 9)], 40, "a new function begins in its own file");
        assert_eq!(profile.own(), 94);
        assert_eq!(profile.c_library(), Calls { count: 6, cost: 6 });
    }

    #[test]
    fn what_is_the_same_in_both_falls_out() {
        let profile = Profile::parse(TEXT, ours).unwrap();
        let none = profile.minus(&profile);
        assert_eq!((none.own(), none.c_library()), (0, Calls::default()));
        assert_eq!(profile.minus(&Profile::default()), profile);
    }

    #[test]
    fn another_event_is_refused() {
        assert!(Profile::parse("events: Dr\nsummary: 1\n", ours).is_err());
        assert!(Profile::parse("events: Ir\nsummary: 1\n1 x\n", ours).is_err());
    }
}
