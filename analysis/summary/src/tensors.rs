//! Derives text from tensor names: the common name of several tensors, and the tensor that a failed request was for.

use memtrace_trace::definition::TensorKind;

use memtrace_insight::passes::{Category, Oom, Phase};
use memtrace_replay::{AllocationNames, Names};

/// The words of a name, each with the separator after it.
fn words(name: &str) -> Vec<&str> {
    name.split_inclusive(['.', ' ']).collect()
}

/// The common pattern of several names, with `*` for the differing parts: `blocks.*.weight`. `None` if the names have
/// nothing in common.
pub(crate) fn name_pattern(names: &[String]) -> Option<String> {
    let (first, others) = names.split_first()?;
    let first = words(first);
    let others: Vec<Vec<&str>> = others.iter().map(|name| words(name)).collect();
    let same = |of: &dyn Fn(&[&str]) -> bool| others.iter().all(|other| of(other));
    // Names of equal length are compared word by word. Other names keep their common start and end.
    let mut parts: Vec<String> = Vec::new();
    if same(&|other| other.len() == first.len()) {
        for (at, word) in first.iter().enumerate() {
            let separator = word.trim_start_matches(|letter| letter != '.' && letter != ' ');
            let known = same(&|other| other.get(at) == Some(word));
            parts.push(if known { (*word).to_owned() } else { format!("*{separator}") });
        }
    } else {
        let shortest = others.iter().map(Vec::len).fold(first.len(), usize::min);
        let mut begin = 0;
        while begin < shortest && same(&|other| other.get(begin) == first.get(begin)) {
            begin += 1;
        }
        let last =
            |of: &[&str], end: usize| of.len().checked_sub(end + 1).and_then(|at| of.get(at).map(|w| (*w).to_owned()));
        let mut end = 0;
        while begin + end < shortest && same(&|other| last(other, end) == last(&first, end)) {
            end += 1;
        }
        parts.extend(first.iter().take(begin).map(|word| (*word).to_owned()));
        parts.push(if end > 0 { "*.".to_owned() } else { "*".to_owned() });
        parts.extend(first.iter().skip(first.len() - end).map(|word| (*word).to_owned()));
    }
    let text = parts.concat();
    text.chars().any(char::is_alphanumeric).then_some(text)
}

/// Splits the name of optimizer state: `Adam.exp_avg of 0.weight` gives its kind and the parameter.
fn state_of(named: &AllocationNames) -> Option<(&str, &str)> {
    match &named.names[..] {
        [only] if named.kind == TensorKind::OptimizerState => only.split_once(" of "),
        _ => None,
    }
}

/// The optimizer state that a failed request was for, if it is certain. `live` are the allocated blocks as `seq` and
/// bytes, in order.
///
/// All of these must hold:
///
/// - The states so far go parameter by parameter, each with the same kinds in the same order.
/// - The stack of the failed request has already allocated a state of the next kind.
/// - The request is as large as the parameter.
pub(crate) fn requested_for(oom: &Oom, live: &[(u64, u64)], names: &Names) -> Option<String> {
    if oom.phase != Phase::Optimizer {
        return None;
    }
    let named = || live.iter().filter_map(|(seq, size)| Some((*seq, *size, names.of_allocation(*seq)?)));
    let size_of = |parameter: &str| {
        named()
            .find(|(.., n)| n.kind == TensorKind::Parameter && n.names.iter().any(|name| **name == *parameter))
            .map(|f| f.1)
    };
    // By parameter: the kinds of its states, in the order of their allocation.
    let mut made: Vec<(&str, Vec<&str>)> = Vec::new();
    for (kind, parameter) in named().filter_map(|(.., named)| state_of(named)) {
        match made.last_mut() {
            Some((last, kinds)) if *last == parameter => kinds.push(kind),
            _ => made.push((parameter, vec![kind])),
        }
    }
    let by_this_stack = |kind: &str| {
        let states = oom
            .in_use
            .origins()
            .filter(|(o, _)| o.category == Category::OptimizerState && o.stack == oom.requested_at.0);
        let mut kinds = states
            .flat_map(|(origin, _)| names.of_allocation_site(origin.stack, origin.context, oom.seq))
            .filter_map(|(_, named)| state_of(named))
            .map(|(kind, _)| kind)
            .peekable();
        kinds.peek().is_some() && kinds.all(|made| made == kind)
    };
    let ((last, kinds), before) = made.split_last()?;
    let (_, order) = before.first()?;
    if before.iter().any(|(_, kinds)| kinds != order) || !order.starts_with(kinds) {
        return None;
    }
    let (kind, parameter) = match order.get(kinds.len()) {
        Some(kind) => (*kind, *last),
        None => (*order.first()?, next_parameter(&made, live, names)?),
    };
    (by_this_stack(kind) && size_of(parameter) == Some(oom.requested)).then(|| format!("{kind} of {parameter}"))
}

/// The parameter after the last one that has state, in the order in which parameters with gradients were allocated.
/// `None` if the states so far do not follow that order.
fn next_parameter<'a>(made: &[(&str, Vec<&str>)], live: &[(u64, u64)], names: &'a Names) -> Option<&'a str> {
    let named = || live.iter().filter_map(|(seq, _)| names.of_allocation(*seq));
    let has_gradient = |parameter: &str| {
        named().any(|n| {
            n.kind == TensorKind::Gradient && n.names.iter().any(|n| n.strip_suffix(".grad") == Some(parameter))
        })
    };
    let parameters =
        named().filter(|n| n.kind == TensorKind::Parameter).filter_map(|n| n.names.first().map(|name| &**name));
    let mut order = parameters.filter(|parameter| has_gradient(parameter));
    for (parameter, _) in made {
        if order.next() != Some(*parameter) {
            return None;
        }
    }
    order.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_common_parts_have_a_pattern() {
        let pattern = |names: &[&str]| name_pattern(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        let text = |names: &[&str]| pattern(names).unwrap_or_default();
        assert_eq!(
            text(&["Adam.exp_avg of blocks.0.mlp.weight", "Adam.exp_avg of blocks.11.mlp.weight"]),
            "Adam.exp_avg of blocks.*.mlp.weight"
        );
        assert_eq!(text(&["blocks.0.weight.grad", "head.weight.grad"]), "*.weight.grad");
        assert_eq!(text(&["Adam.exp_avg of 0.weight", "Adam.exp_avg of a.b.bias"]), "Adam.exp_avg of *");
        assert_eq!(text(&["fc.weight"]), "fc.weight");
        assert_eq!(text(&["a.weight", "a.bias"]), "a.*");
        assert_eq!(pattern(&["weight", "bias"]), None);
    }
}
