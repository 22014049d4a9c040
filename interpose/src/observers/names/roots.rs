//! Prefixes for models whose parameters have the same names: `generator.0.weight`, `discriminator.0.weight`.
//!
//! A model whose parameter names clash with no other model gets no prefix. A prefix that was reported never changes. A
//! later model takes the first of these that is free:
//! - its class, if no other model has that class;
//! - the global variable of the program that refers to it;
//! - its class and a number.

use super::address_hash::ParameterNames;
use super::object_id::ObjectId;
use super::walk::ModelWalk;
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, class_name};

/// A model and its prefix.
pub(super) struct Root {
    pub(super) id: ObjectId,
    /// The prefix of its parameters' names, usually empty.
    pub(super) prefix: Box<str>,
}

/// Assigns a prefix to each of the models `found` that `before` does not contain. Models without parameters get none.
pub(super) fn assign_prefixes(
    gil: GilToken<'_>,
    walk: &mut ModelWalk<'_, '_>,
    found: &[PyObjectPtr],
    before: Vec<Root>,
) -> Vec<Root> {
    // SAFETY: the interpreter has just listed these objects, and this thread holds the GIL.
    let ids: Vec<ObjectId> = found.iter().map(|object| unsafe { ObjectId::of(*object) }).collect();
    let old = |id: &ObjectId| before.iter().position(|root| root.id == *id);
    if ids.iter().all(|id| old(id).is_some()) || ids.len() < 2 {
        let prefix =
            |id: &ObjectId| old(id).and_then(|at| before.get(at)).map_or("".into(), |root| root.prefix.clone());
        return ids.into_iter().map(|id| Root { prefix: prefix(&id), id }).collect();
    }
    let parameters: Vec<ParameterNames> = found.iter().map(|object| walk.parameter_names(*object)).collect();
    let clash = |a: &ParameterNames, b: &ParameterNames| {
        a.iter().any(|(name, object)| b.get(name).is_some_and(|other| other != object))
    };
    let mut roots: Vec<Root> = Vec::new();
    for (at, id) in ids.iter().enumerate() {
        if let Some(root) = old(id).and_then(|at| before.get(at)) {
            roots.push(Root { id: *id, prefix: root.prefix.clone() });
            continue;
        }
        let mine = parameters.get(at);
        let clashes = parameters
            .iter()
            .enumerate()
            .any(|(other, theirs)| other != at && mine.is_some_and(|mine| clash(mine, theirs)));
        let mut name: Box<str> = "".into();
        if let Some(object) = found.get(at).filter(|_| clashes) {
            let class = class(*object);
            let of_class = found
                .iter()
                .zip(&parameters)
                .filter(|(other, parameters)| !parameters.is_empty() && self::class(**other) == class);
            let is_taken = |name: &str| roots.iter().chain(&before).any(|root| *root.prefix == *name);
            let variable = || gil.global_variable_name(*object).filter(|variable| !is_taken(variable));
            name = if of_class.count() == 1 && !is_taken(class) {
                class.into()
            } else if let Some(variable) = variable() {
                variable.into()
            } else {
                // An earlier model of this class may have been reported without a prefix.
                let has_unprefixed =
                    before.iter().any(|root| root.prefix.is_empty() && self::class(root.id.object()) == class);
                let numbered = (1 + usize::from(has_unprefixed)..).map(|number| format!("{class}#{number}"));
                numbered.take(found.len() + before.len() + 1).find(|name| !is_taken(name)).unwrap_or_default().into()
            };
        }
        roots.push(Root { id: *id, prefix: name });
    }
    roots
}

fn class<'a>(object: PyObjectPtr) -> &'a str {
    // SAFETY: callers pass live objects. The type of an object lives at least as long.
    unsafe { class_name(object) }
}
