//! Which module has which parameters, by their names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use memtrace_trace::event::Event;
use memtrace_trace::ids::ContextId;

use memtrace_replay::{AllocationNames, Names};

/// The parameters of each module. Memory use grows with the names and the calls of modules.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    /// By module path: the last part of each parameter's name, and its requested bytes.
    parameters: BTreeMap<Box<str>, BTreeSet<(Box<str>, u64)>>,
    /// By call of a module and requested bytes: earlier answers.
    counts: HashMap<(ContextId, u64), Option<u32>>,
}

impl Owners {
    /// Adds the names of a parameter of `requested` bytes.
    pub(super) fn add(&mut self, names: &AllocationNames, requested: u64) {
        for (path, name) in names.names.iter().filter_map(|name| name.rsplit_once('.')) {
            match self.parameters.get_mut(path) {
                Some(parameters) => {
                    parameters.insert((name.into(), requested));
                }
                None => {
                    self.parameters.insert(path.into(), BTreeSet::from([(name.into(), requested)]));
                }
            }
        }
    }

    /// How many parameters of `requested` bytes the module has whose call allocates the block of `e`, with those of the
    /// modules inside it. `None` if its parameters are unknown.
    pub(super) fn count_of_call(&mut self, names: &Names, e: &Event, requested: u64) -> Option<u32> {
        let parameters = &self.parameters;
        *self.counts.entry((e.context, requested)).or_insert_with(|| {
            let path = names.module_path(e.context, e.seq)?;
            let is_inside =
                |other: &str| other.strip_prefix(&*path).is_some_and(|r| r.is_empty() || r.starts_with('.'));
            let from = (Bound::Included(&*path), Bound::Unbounded);
            let all = parameters.range::<str, _>(from).take_while(|(other, _)| other.starts_with(&*path));
            let mut inside = all.filter(|(other, _)| is_inside(other)).map(|(_, owned)| owned).peekable();
            inside.peek()?;
            Some(inside.flatten().filter(|(_, bytes)| *bytes == requested).count() as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::definition::TensorKind;
    use memtrace_trace::file::{Definitions, NnCall, NnName};

    #[test]
    fn a_call_has_the_parameters_of_its_module_and_the_modules_inside() {
        let mut definitions = Definitions::default();
        for (id, path) in [(1, "layers.1"), (2, "layers.1.attention"), (3, "loss")] {
            let (object, class) = (u64::from(id), "M");
            let call = NnCall { caller: ContextId::NONE, object, class: class.into() };
            definitions.nn_calls.insert(ContextId(id), call);
            definitions.nn_names.push(NnName { object, seq: 1, class: class.into(), name: path.into() });
        }
        let names = Names::of(&MemoryRecording { definitions, ..MemoryRecording::default() });
        let mut owners = Owners::default();
        let mut add = |name: &str, bytes| {
            let names = vec![name.into()];
            owners.add(&AllocationNames { kind: TensorKind::Parameter, names, shape: "".into() }, bytes);
        };
        add("layers.1.attention.weight", 64);
        add("layers.1.attention.out.weight", 64);
        // The same parameter, allocated anew; a module whose path begins alike; a parameter of no module.
        add("layers.1.attention.weight", 64);
        add("layers.10.attention.weight", 64);
        add("scale", 64);
        let mut count = |context, bytes| {
            let e = Event { seq: 9, context: ContextId(context), ..Event::EMPTY };
            owners.count_of_call(&names, &e, bytes)
        };
        assert_eq!(count(1, 64), Some(2));
        assert_eq!(count(2, 64), Some(2));
        assert_eq!(count(2, 32), Some(0));
        assert_eq!(count(3, 64), None);
    }
}
