//! What a model is called where another has parameters of the same names: `generator.0.weight`, `discriminator.0.weight`.
//!
//! A model that is alone with its parameters' names keeps them as they are, and a name that has been told stays: who comes later is called
//! by its class, where no other model is of that class, else by the global variable of the program that holds it, else by its class and
//! a number.

use std::collections::HashMap;

use super::Known;
use super::python::{Object, Session, type_name, type_of};
use super::walk::{Spreading, Walk};

/// A model.
pub(super) struct Root {
    pub(super) known: Known,
    /// What stands before its parameters' names; mostly nothing.
    pub(super) name: Box<str>,
}

/// By a hash of a parameter's name: the parameter.
pub(super) type Own = HashMap<u64, usize, Spreading>;

/// Gives names to those of these models that `before` has not. What has no parameters keeps none.
pub(super) fn named(session: Session<'_>, walk: &mut Walk<'_, '_>, found: &[Object], before: Vec<Root>) -> Vec<Root> {
    // SAFETY: objects, as the interpreter has just listed them.
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
                // One of them may have been told without a name of its own.
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
    // SAFETY: a live object, whose type lives as long as it.
    unsafe { type_name(type_of(object)) }
}
