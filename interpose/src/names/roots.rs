//! Prefixes for models whose parameters have the same names: `generator.0.weight`, `discriminator.0.weight`.
//!
//! A model whose parameter names clash with no other model gets no prefix. A prefix that was reported never changes. A
//! later model takes the first of these that is free:
//! - its class, if no other model has that class;
//! - the global variable of the program that refers to it;
//! - its class and a number.

use std::collections::HashMap;

use super::Known;
use super::python::{Object, Session, type_name, type_of};
use super::walk::{Spreading, Walk};

/// A model and its prefix.
pub(super) struct Root {
    pub(super) known: Known,
    /// The prefix of its parameters' names, usually empty.
    pub(super) name: Box<str>,
}

/// Maps a hash of a parameter's name to the parameter's object.
pub(super) type Own = HashMap<u64, usize, Spreading>;

/// Assigns a prefix to each of the models `found` that `before` does not contain. Models without parameters get none.
pub(super) fn named(session: Session<'_>, walk: &mut Walk<'_, '_>, found: &[Object], before: Vec<Root>) -> Vec<Root> {
    // SAFETY: the interpreter has just listed these objects, and this thread holds the GIL.
    let known: Vec<Known> = found.iter().map(|object| unsafe { Known::of(*object) }).collect();
    let old = |known: &Known| before.iter().position(|root| root.known == *known);
    if known.iter().all(|known| old(known).is_some()) || known.len() < 2 {
        let name = |known: &Known| old(known).and_then(|at| before.get(at)).map_or("".into(), |root| root.name.clone());
        return known.into_iter().map(|known| Root { name: name(&known), known }).collect();
    }
    let own: Vec<Own> = found.iter().map(|object| walk.own(*object)).collect();
    let clash = |a: &Own, b: &Own| a.iter().any(|(name, object)| b.get(name).is_some_and(|other| other != object));
    let mut roots: Vec<Root> = Vec::new();
    for (at, known) in known.iter().enumerate() {
        if let Some(root) = old(known).and_then(|at| before.get(at)) {
            roots.push(Root { known: *known, name: root.name.clone() });
            continue;
        }
        let mine = own.get(at);
        let clashes =
            own.iter().enumerate().any(|(other, theirs)| other != at && mine.is_some_and(|mine| clash(mine, theirs)));
        let mut name: Box<str> = "".into();
        if let Some(object) = found.get(at).filter(|_| clashes) {
            let class = class(*object);
            let of_class =
                found.iter().zip(&own).filter(|(other, own)| !own.is_empty() && self::class(**other) == class);
            let is_taken = |name: &str| roots.iter().chain(&before).any(|root| *root.name == *name);
            let variable = || session.variable(*object).filter(|variable| !is_taken(variable));
            name = if of_class.count() == 1 && !is_taken(class) {
                class.into()
            } else if let Some(variable) = variable() {
                variable.into()
            } else {
                // An earlier model of this class may have been reported without a prefix.
                let nameless =
                    before.iter().any(|root| root.name.is_empty() && self::class(root.known.object()) == class);
                let numbered = (1 + usize::from(nameless)..).map(|number| format!("{class}#{number}"));
                numbered.take(found.len() + before.len() + 1).find(|name| !is_taken(name)).unwrap_or_default().into()
            };
        }
        roots.push(Root { known: *known, name });
    }
    roots
}

fn class<'a>(object: Object) -> &'a str {
    // SAFETY: callers pass live objects. The type of an object lives at least as long.
    unsafe { type_name(type_of(object)) }
}
