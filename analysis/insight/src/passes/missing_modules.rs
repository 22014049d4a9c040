//! The modules that an interrupted forward pass had not yet called: the missing ones of repeated modules, with their
//! activations, and other modules by name.
//!
//! The activations of a missing module are those of its siblings of the same class whose calls are complete. This is
//! stated only if the siblings agree: the calls go through them in their order, at least two are complete, and their
//! activations differ by at most a twentieth. The first of three or more can differ, because it can compute what the
//! others share.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::{Definitions, NnCall, NnName};
use memtrace_trace::ids::ContextId;

use super::category::Category;
use super::composition::Amount;
use super::modules::ModuleTree;
use super::rest_of_step::CallLevel;
use crate::rules::UserClasses;
use memtrace_replay::{Contexts, Names};

/// The activations of complete siblings may differ by 5 % (1/20).
const ALIKE: u64 = 20;
/// The minimum number of complete siblings.
const MIN_COMPLETE: usize = 2;

/// Sibling modules of one class, of which a forward pass had not called all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingSiblings {
    /// Their common path, for example `blocks.*`.
    pub pattern: String,
    /// Their class.
    pub class: String,
    /// The number of all siblings of the class.
    pub count: usize,
    /// The number of siblings that were not called.
    pub missing: usize,
    /// The number of complete siblings whose mean is `each`.
    pub complete: usize,
    /// The mean activations of a complete sibling, in bytes.
    pub each: u64,
    /// The part of this mean that the running sibling lacks, in bytes.
    pub rest_of_running: u64,
    /// The highest number of allocated bytes in the last sibling's call, if it goes as those of the complete siblings;
    /// `None` if the order of the calls is unknown.
    pub peak: Option<u64>,
}

/// The modules that an interrupted forward pass had not yet called.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MissingModules {
    /// The outermost repeated modules with known activations.
    pub siblings: Option<MissingSiblings>,
    /// The path and the class of other modules with parameters that the program never called, in the model's order.
    pub uncalled: Vec<(String, String)>,
}

impl MissingModules {
    /// `tree` is the memory by module when the request failed. `calls` are the allocated bytes during the calls of this
    /// forward pass. `context` is the call that made the request. `seq` is the event number of the request.
    pub fn of(
        tree: &ModuleTree,
        definitions: &Definitions,
        names: &Names,
        contexts: &Contexts,
        calls: &[CallLevel],
        (context, seq): (ContextId, u64),
    ) -> MissingModules {
        let mut found = MissingModules::default();
        let chain: Vec<(ContextId, &NnCall)> = definitions.nn_call_chain(contexts.module(context)).collect();
        let Some((_, outermost)) = chain.last() else { return found };
        let classes = UserClasses::of(definitions);
        let Some(activations) = activations_of_root(tree, classes.name(&outermost.class)) else { return found };
        // The path of a model itself is its class.
        let path_of = |id: ContextId, call: &NnCall| {
            let path = names.module_path(id, seq).filter(|path| !path.contains('/'))?;
            Some(if call.caller.is_none() && *path == *call.class { String::new() } else { path })
        };
        let paths: Vec<(String, &NnCall)> =
            chain.iter().filter_map(|(id, call)| Some((path_of(*id, call)?, *call))).collect();
        for (path, call) in &paths {
            if path.is_empty() {
                continue;
            }
            let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
            let Some(children) = children(definitions, parent) else { continue };
            // Modules missing inside the running one of several equal modules belong to the rest of that module.
            let siblings = missing_siblings(parent, path, call, &children, &activations);
            let peak = |siblings: MissingSiblings| {
                let alike = children.iter().filter(|child| child.class == call.class).copied();
                let alike: Vec<&NnName> = alike.collect();
                let peak = peak_of(&siblings, &alike, definitions, contexts, calls);
                let class = classes.name(&siblings.class).to_owned();
                MissingSiblings { peak, class, ..siblings }
            };
            found.siblings = siblings.map(peak).or(found.siblings);
        }
        // The children of the model itself have no common prefix.
        let repeated = found.siblings.as_ref().map(|siblings| siblings.pattern.trim_end_matches('*').to_owned());
        let repeated = repeated.filter(|prefix| !prefix.is_empty());
        let mut uncalled: Vec<&NnName> = Vec::new();
        for (path, _) in paths.iter().rev() {
            if repeated.as_ref().is_some_and(|repeated| path.starts_with(repeated)) {
                break;
            }
            add_uncalled(definitions, path, repeated.as_deref(), &mut uncalled);
        }
        let mut uncalled = by_object(uncalled);
        let is_of_siblings =
            |class: &str| found.siblings.as_ref().is_some_and(|siblings| *siblings.class == *classes.name(class));
        uncalled.retain(|child| repeated.is_some() || !is_of_siblings(&child.class));
        let order = |child: &NnName| definitions.nn_names.iter().position(|name| name.name == child.name);
        uncalled.sort_by_cached_key(|child| (order(child), child.object));
        uncalled.dedup_by_key(|child| &child.name);
        let own_class = |child: &NnName| classes.name(&child.class).to_owned();
        found.uncalled = uncalled.iter().map(|child| (child.name.to_string(), own_class(child))).collect();
        found
    }
}

/// By path: what backward needs of the modules below the only root of this class.
fn activations_of_root(tree: &ModuleTree, class: &str) -> Option<BTreeMap<String, u64>> {
    let mut roots = tree.modules.iter().enumerate().filter(|(_, one)| one.depth == 0 && one.class == class);
    let (first, _) = roots.next()?;
    if roots.next().is_some() {
        return None;
    }
    let inside = tree.modules.iter().skip(first + 1).take_while(|one| one.depth > 0);
    Some(inside.map(|one| (one.path.clone(), activations(&one.whole))).collect())
}

/// Bytes that a forward pass made and that are no parameters, gradients or state.
fn activations(whole: &[Amount; Category::ALL.len()]) -> u64 {
    let made = [Category::Activation, Category::Temporary, Category::KvCache, Category::Unknown];
    made.iter().map(|category| whole[*category as usize].bytes).sum()
}

/// The direct children of the module with this path, in the model's order. `None` if several modules have that path.
fn children<'a>(definitions: &'a Definitions, parent: &str) -> Option<Vec<&'a NnName>> {
    let mut children: Vec<&NnName> = Vec::new();
    for name in &definitions.nn_names {
        let is_child = match name.name.rsplit_once('.') {
            Some((of, _)) => of == parent,
            None => parent.is_empty() && !name.name.is_empty(),
        };
        if !is_child {
            continue;
        }
        match children.iter().find(|child| child.name == name.name) {
            Some(same) if same.object == name.object && same.class == name.class => {}
            Some(_) => return None,
            None => children.push(name),
        }
    }
    Some(children)
}

fn missing_siblings(
    parent: &str,
    running: &str,
    call: &NnCall,
    children: &[&NnName],
    activations: &BTreeMap<String, u64>,
) -> Option<MissingSiblings> {
    let alike: Vec<&NnName> = children.iter().copied().filter(|child| child.class == call.class).collect();
    let at = alike.iter().position(|child| *child.name == *running)?;
    let of = |child: &&NnName| activations.get(&*child.name).copied().unwrap_or(0);
    let done: Vec<u64> = alike[..at].iter().map(of).collect();
    if done.len() < MIN_COMPLETE || done.contains(&0) || alike[at + 1..].iter().any(|child| of(child) > 0) {
        return None;
    }
    let compared = if done.len() > MIN_COMPLETE { &done[1..] } else { &done[..] };
    let (least, most) = (compared.iter().min()?, compared.iter().max()?);
    let each = compared.iter().sum::<u64>() / compared.len() as u64;
    ((most - least).saturating_mul(ALIKE) <= *most).then(|| MissingSiblings {
        pattern: if parent.is_empty() { "*".to_owned() } else { format!("{parent}.*") },
        class: call.class.to_string(),
        count: alike.len(),
        missing: alike.len() - at - 1,
        complete: compared.len(),
        each,
        rest_of_running: each.saturating_sub(of(&alike[at])),
        peak: None,
    })
}

/// The highest number of allocated bytes in the call of the last of `alike`.
fn peak_of(
    siblings: &MissingSiblings,
    alike: &[&NnName],
    definitions: &Definitions,
    contexts: &Contexts,
    calls: &[CallLevel],
) -> Option<u64> {
    let called = alike.len() - siblings.missing;
    let mut levels: Vec<Option<CallLevel>> = vec![None; called];
    for one in calls {
        let chain: Vec<(ContextId, &NnCall)> = definitions.nn_call_chain(contexts.module(one.call)).collect();
        let is_in = |(_, name): &(usize, &&NnName)| chain.iter().any(|(_, call)| call.object == name.object);
        let Some((at, _)) = alike.iter().take(called).enumerate().find(is_in) else { continue };
        let first = *levels[at].get_or_insert(*one);
        levels[at] = Some(CallLevel {
            call: one.call,
            seqs: (first.seqs.0.min(one.seqs.0), first.seqs.1.max(one.seqs.1)),
            before: if one.seqs.0 < first.seqs.0 { one.before } else { first.before },
            peak: first.peak.max(one.peak),
        });
    }
    let levels: Vec<CallLevel> = levels.into_iter().collect::<Option<Vec<CallLevel>>>()?;
    if levels.windows(2).any(|pair| pair[0].seqs.1 > pair[1].seqs.0) {
        return None;
    }
    let (running, complete) = levels.split_last()?;
    let alike = &complete[complete.len().checked_sub(siblings.complete)?..];
    let within = alike.iter().map(|call| call.peak - call.before).min()?;
    Some(running.before + siblings.each.saturating_mul(siblings.missing as u64) + within)
}

/// Adds the modules with parameters below the module `path` that the program never called. A module list is never
/// called itself; if some of its modules were called, the others are added. Paths that begin with `repeated` are left
/// out.
fn add_uncalled<'a>(definitions: &'a Definitions, path: &str, repeated: Option<&str>, uncalled: &mut Vec<&'a NnName>) {
    let is_called = |object: u64| definitions.nn_calls.values().any(|call| call.object == object);
    for child in children(definitions, path).unwrap_or_default() {
        let inside = |name: &str| name.strip_prefix(&*child.name).is_some_and(|rest| rest.starts_with('.'));
        let is_done = || is_called(child.object) || shares_parameters(definitions, child);
        if !has_parameters(definitions, &child.name) || is_done() {
            continue;
        }
        if definitions.nn_names.iter().any(|one| inside(&one.name) && is_called(one.object)) {
            // The paths get longer, so the recursion ends.
            add_uncalled(definitions, &child.name, repeated, uncalled);
        } else if repeated.is_none_or(|repeated| !child.name.starts_with(repeated)) {
            uncalled.push(child);
        }
    }
}

/// Each module once. A module below two roots, one of which contains the other, has two paths. The path from the outer
/// root is longer.
fn by_object(names: Vec<&NnName>) -> Vec<&NnName> {
    let mut paths: BTreeMap<u64, &NnName> = BTreeMap::new();
    for name in names {
        let path = paths.entry(name.object).or_insert(name);
        if name.name.len() > path.name.len() {
            *path = name;
        }
    }
    paths.into_values().collect()
}

/// The addresses of the parameters that are named below this path.
fn parameters<'a>(definitions: &'a Definitions, path: &'a str) -> impl Iterator<Item = u64> + 'a {
    let inside = move |name: &str| name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    let named = definitions.tensor_names.iter().filter(move |one| one.kind == TensorKind::Parameter);
    named.filter(move |one| inside(&one.name)).map(|one| one.address)
}

fn has_parameters(definitions: &Definitions, path: &str) -> bool {
    parameters(definitions, path).next().is_some()
}

/// Whether a module that was called works with the parameters of this one of the same class (tied weights). A root
/// gives a parameter that two modules share the name of the first. So the called one has no parameters under its own
/// paths, or another root names the same address for it.
fn shares_parameters(definitions: &Definitions, child: &NnName) -> bool {
    let own: BTreeSet<u64> = parameters(definitions, &child.name).collect();
    let called = definitions.nn_calls.values().filter(|call| call.class == child.class && call.object != child.object);
    let shares = |object: u64| {
        let paths = || definitions.nn_names.iter().filter(|name| name.object == object).map(|name| &*name.name);
        let is_without = paths().next().is_some() && paths().all(|path| !has_parameters(definitions, path));
        is_without || paths().any(|path| parameters(definitions, path).any(|address| own.contains(&address)))
    };
    called.map(|call| call.object).collect::<BTreeSet<u64>>().into_iter().any(shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::ModuleMemory;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::file::TensorName;

    /// A model with six blocks and a head, of which the blocks in `activations` (in MiB) have been called.
    fn missing(activations: &[u64]) -> MissingModules {
        let mut recording = MemoryRecording::default();
        let definitions = &mut recording.definitions;
        let mut name = |id: u64, class: &str, path: &str, is_called: bool, caller: u32| {
            definitions.nn_names.push(NnName { object: id, seq: 9, class: class.into(), name: path.into() });
            let shape = "float32[2]".into();
            let name = format!("{path}.weight").into();
            definitions.tensor_names.push(TensorName {
                address: id << 9,
                seq: 9,
                kind: TensorKind::Parameter,
                name,
                shape,
            });
            if is_called {
                let call = NnCall { caller: ContextId(caller), object: id, class: class.into() };
                definitions.nn_calls.insert(ContextId(id as u32), call);
            }
        };
        name(1, "GPT", "", true, 0);
        name(2, "ModuleList", "blocks", false, 0);
        for block in 0..6 {
            name(3 + block, "Block", &format!("blocks.{block}"), block < activations.len() as u64, 1);
        }
        name(9, "Linear", "head", false, 0);
        recording.definitions.contexts = vec![Default::default(); 10];
        let definitions = &recording.definitions;
        let module = |path: &str, class: &str, depth, mib: u64| {
            let mut whole = [Amount::default(); Category::ALL.len()];
            whole[Category::Activation as usize] = Amount { bytes: mib << 20, blocks: 1 };
            ModuleMemory { path: path.to_owned(), class: class.to_owned(), depth, whole, own: whole }
        };
        let mut modules = vec![module("", "GPT", 0, 99), module("blocks", "", 1, 99)];
        let blocks = activations.iter().enumerate();
        modules.extend(blocks.map(|(at, mib)| module(&format!("blocks.{at}"), "Block", 2, *mib)));
        let tree = ModuleTree { modules, ..ModuleTree::default() };
        let running = ContextId(2 + activations.len() as u32);
        let level = |at: u64, mib: u64| CallLevel {
            call: ContextId(3 + at as u32),
            seqs: (10 * at, 10 * at + 9),
            before: (50 + 10 * at) << 20,
            peak: (50 + 10 * at + mib + 7) << 20,
        };
        let calls: Vec<CallLevel> = (0..).zip(activations).map(|(at, mib)| level(at, *mib)).collect();
        let contexts = Contexts::of(definitions);
        MissingModules::of(&tree, definitions, &Names::of(&recording), &contexts, &calls, (running, 9))
    }

    #[test]
    fn missing_blocks_have_the_mean_of_complete_ones() {
        let found = missing(&[13, 10, 10, 4]);
        let siblings = found.siblings.clone().unwrap();
        let expected = ("blocks.*", "Block", 6, 2, 2);
        let figures = (&*siblings.pattern, &*siblings.class, siblings.count, siblings.missing, siblings.complete);
        assert_eq!(figures, expected);
        assert_eq!((siblings.each >> 20, siblings.rest_of_running >> 20), (10, 6));
        // The fourth block began at 80 MiB. Two more of 10 MiB follow, and the last needs 7 MiB more while it runs.
        assert_eq!(siblings.peak.map(|bytes| bytes >> 20), Some(80 + 2 * 10 + 17));
        assert_eq!(found.uncalled, [("head".to_owned(), "Linear".to_owned())]);
    }

    #[test]
    fn modules_with_two_paths_or_tied_parameters_are_counted_once() {
        let name =
            |object: u64, class: &str, path: &str| NnName { object, seq: 9, class: class.into(), name: path.into() };
        let parameter = |address: u64, path: &str| TensorName {
            address,
            seq: 9,
            kind: TensorKind::Parameter,
            name: path.into(),
            shape: "float32[2]".into(),
        };
        let call = |object: u64, class: &str| NnCall { caller: ContextId(1), object, class: class.into() };
        // `shared` and `encoder.embed` have one weight. The wrapped model is a root as well.
        let mut definitions = Definitions {
            nn_names: vec![
                name(1, "Wrapper", ""),
                name(2, "Model", "base"),
                name(3, "Embedding", "base.shared"),
                name(4, "Encoder", "base.encoder"),
                name(5, "Embedding", "base.encoder.embed"),
                name(6, "Linear", "base.head"),
                name(6, "Linear", "head"),
            ],
            tensor_names: vec![
                parameter(512, "base.shared.weight"),
                parameter(1024, "base.head.weight"),
                parameter(1024, "head.weight"),
            ],
            ..Definitions::default()
        };
        definitions.nn_calls.insert(ContextId(5), call(5, "Embedding"));
        assert!(shares_parameters(&definitions, &definitions.nn_names[2]));
        let uncalled = |definitions: &Definitions| {
            let mut uncalled = Vec::new();
            add_uncalled(definitions, "", None, &mut uncalled);
            by_object(uncalled).into_iter().map(|child| child.name.to_string()).collect::<Vec<String>>()
        };
        assert_eq!(uncalled(&definitions), ["base.head"]);
        // The encoder is a root of its own, which names the same address.
        definitions.nn_names.push(name(5, "Embedding", "embed"));
        definitions.tensor_names.push(parameter(512, "embed.weight"));
        assert_eq!(uncalled(&definitions), ["base.head"]);
        definitions.tensor_names.pop();
        definitions.nn_names.pop();
        // Its own weight: `shared` is another module, and still to come.
        definitions.tensor_names.push(parameter(2048, "base.encoder.embed.weight"));
        assert_eq!(uncalled(&definitions), ["base.shared", "base.head"]);
    }

    #[test]
    fn without_agreement_there_is_no_figure() {
        // One complete block; blocks that differ; a block that was called before the running one and has nothing left.
        for activations in [&[10, 4][..], &[10, 20, 30, 4], &[10, 11, 10, 4], &[10, 10, 0, 4]] {
            assert_eq!(missing(activations).siblings, None, "{activations:?}");
        }
        let uncalled = missing(&[10, 20, 30, 4]).uncalled;
        let paths: Vec<&str> = uncalled.iter().map(|(path, _)| &**path).collect();
        assert_eq!(paths, ["blocks.4", "blocks.5", "head"]);
    }
}
