//! A graph of references between numbered objects, and the reference cycles in it that hold tensors.

use std::collections::{HashMap, HashSet, VecDeque};

/// The search from a cycle to its tensors visits at most this many objects.
const MAX_VISITED: usize = 20_000;
/// At most this many tensors are listed for one cycle.
const MAX_TENSORS: usize = 16;
/// At most this many members of a cycle are compared for where its description starts.
const MAX_STARTS: usize = 256;

/// Which object holds references to which others.
#[derive(Default)]
pub(super) struct ReferenceGraph {
    /// For each object, the index in `to` of its first reference.
    first: Vec<u32>,
    /// The referenced objects.
    to: Vec<u32>,
}

/// A set of objects each of which reaches all others through references, and the tensors it holds.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct TensorCycle {
    /// All objects of the set, by number.
    pub(super) members: Vec<u32>,
    /// A shortest path back to its first object. It starts at the member nearest to a tensor, which is not repeated at
    /// the end.
    pub(super) path: Vec<u32>,
    /// A shortest path from that member to the tensor, both included.
    pub(super) to_tensor: Vec<u32>,
    /// Tensors that the cycle holds, nearest first, at most [`MAX_TENSORS`].
    pub(super) tensors: Vec<u32>,
}

fn get<T: Copy + Default>(values: &[T], at: u32) -> T {
    values.get(at as usize).copied().unwrap_or_default()
}

fn set<T>(values: &mut [T], at: u32, value: T) {
    if let Some(slot) = values.get_mut(at as usize) {
        *slot = value;
    }
}

impl ReferenceGraph {
    /// Adds an object. Its references follow.
    pub(super) fn add_object(&mut self) {
        self.first.push(self.to.len() as u32);
    }

    /// Adds a reference from the object added last to `other`.
    pub(super) fn add_reference(&mut self, other: u32) {
        self.to.push(other);
    }

    /// The objects to which `object` holds references.
    pub(super) fn references_of(&self, object: u32) -> &[u32] {
        let begin = get(&self.first, object) as usize;
        let end = self.first.get(object as usize + 1).map_or(self.to.len(), |end| *end as usize);
        self.to.get(begin..end).unwrap_or_default()
    }

    /// For each object the number of its strongly connected component (Tarjan's algorithm, without recursion).
    fn components(&self) -> Vec<u32> {
        let count = self.first.len();
        // 0 means: not visited, not assigned.
        let (mut index, mut low, mut component) = (vec![0; count], vec![0; count], vec![0; count]);
        let (mut open, mut calls) = (Vec::new(), Vec::new());
        let (mut visited, mut found) = (0, 0);
        for root in 0..count as u32 {
            if get(&index, root) == 0 {
                calls.push((root, 0));
            }
            while let Some((object, reference)) = calls.pop() {
                if reference == 0 {
                    visited += 1;
                    set(&mut index, object, visited);
                    set(&mut low, object, visited);
                    open.push(object);
                }
                let mut lowest: u32 = get(&low, object);
                let mut deeper = None;
                for (at, next) in self.references_of(object).iter().enumerate().skip(reference) {
                    if get(&index, *next) == 0 {
                        deeper = Some((at + 1, *next));
                        break;
                    }
                    if get(&component, *next) == 0 {
                        lowest = lowest.min(get(&index, *next));
                    }
                }
                set(&mut low, object, lowest);
                if let Some((reference, next)) = deeper {
                    calls.push((object, reference));
                    calls.push((next, 0));
                    continue;
                }
                if lowest == get(&index, object) {
                    found += 1;
                    while let Some(member) = open.pop() {
                        set(&mut component, member, found);
                        if member == object {
                            break;
                        }
                    }
                }
                if let Some((above, _)) = calls.last() {
                    let least = get(&low, *above).min(lowest);
                    set(&mut low, *above, least);
                }
            }
        }
        component
    }

    /// The cycles that hold tensors, in order of their first objects, at most `limit`.
    pub(super) fn cycles(&self, is_tensor: impl Fn(u32) -> bool, limit: usize) -> Vec<TensorCycle> {
        let component = self.components();
        let mut members: HashMap<u32, Vec<u32>> = HashMap::new();
        for (object, of) in (0..).zip(&component) {
            members.entry(*of).or_default().push(object);
        }
        let mut sets: Vec<Vec<u32>> = members.into_values().collect();
        sets.retain(|set| set.len() > 1 || set.first().is_some_and(|one| self.references_of(*one).contains(one)));
        sets.sort_unstable_by_key(|set| set.first().copied());
        sets.truncate(limit);
        let cycle = |members: Vec<u32>| {
            let (to_tensor, tensors) = self.find_tensors(&members, usize::MAX, &is_tensor);
            let start = *to_tensor.first()?;
            let of = get(&component, start);
            let path = self.path_back(start, |object| get(&component, object) == of)?;
            Some(TensorCycle { members, path, to_tensor, tensors })
        };
        sets.into_iter().filter_map(cycle).collect()
    }

    /// The same cycle, described from each member that is as near to a tensor as the nearest.
    ///
    /// The collector lists objects in no fixed order. A caller that chooses among these by their text gets the same
    /// description in every run.
    pub(super) fn descriptions(&self, cycle: &TensorCycle, is_tensor: impl Fn(u32) -> bool) -> Vec<TensorCycle> {
        let members: HashSet<u32> = cycle.members.iter().copied().collect();
        let from = |start: &u32| {
            let (to_tensor, _) = self.find_tensors(std::slice::from_ref(start), cycle.to_tensor.len(), &is_tensor);
            let is_nearest = to_tensor.len() == cycle.to_tensor.len();
            let path =
                if is_nearest { self.path_back(*start, |object| members.contains(&object))? } else { return None };
            Some(TensorCycle { members: cycle.members.clone(), path, to_tensor, tensors: cycle.tensors.clone() })
        };
        cycle.members.iter().take(MAX_STARTS).filter_map(from).collect()
    }

    /// A shortest path of at most `max_length` objects from any of these objects to a tensor, and the tensors found.
    fn find_tensors(&self, from: &[u32], max_length: usize, is_tensor: &impl Fn(u32) -> bool) -> (Vec<u32>, Vec<u32>) {
        let mut predecessors: HashMap<u32, u32> = from.iter().map(|object| (*object, *object)).collect();
        let mut next: VecDeque<(u32, usize)> = from.iter().map(|object| (*object, 1)).collect();
        let (mut path, mut tensors) = (Vec::new(), Vec::new());
        while let Some((object, length)) = next.pop_front() {
            if is_tensor(object) {
                if tensors.is_empty() {
                    path = path_to(&predecessors, object);
                }
                tensors.push(object);
                if tensors.len() == MAX_TENSORS {
                    break;
                }
            }
            for other in self.references_of(object).iter().filter(|_| length < max_length) {
                if predecessors.len() < MAX_VISITED.max(from.len()) && !predecessors.contains_key(other) {
                    predecessors.insert(*other, object);
                    next.push_back((*other, length + 1));
                }
            }
        }
        (path, tensors)
    }

    /// A shortest path from an object back to itself through objects that satisfy `within`. `None` if there is none.
    fn path_back(&self, start: u32, within: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
        let mut predecessors = HashMap::from([(start, start)]);
        let mut next = VecDeque::from([start]);
        while let Some(object) = next.pop_front() {
            for other in self.references_of(object) {
                if *other == start {
                    return Some(path_to(&predecessors, object));
                }
                if within(*other) && !predecessors.contains_key(other) {
                    predecessors.insert(*other, object);
                    next.push_back(*other);
                }
            }
        }
        None
    }

    /// The objects nearest to a cycle's paths, including them, at most `limit`.
    pub(super) fn nearest_objects(&self, cycle: &TensorCycle, limit: usize) -> Vec<u32> {
        let mut all: Vec<u32> = Vec::new();
        let mut seen = HashSet::new();
        let paths = cycle.path.iter().chain(&cycle.to_tensor);
        let mut next: VecDeque<u32> = paths.copied().filter(|object| seen.insert(*object)).collect();
        while let Some(object) = next.pop_front() {
            if all.len() == limit {
                break;
            }
            all.push(object);
            next.extend(self.references_of(object).iter().copied().filter(|other| seen.insert(*other)));
        }
        all
    }
}

/// The path that led to an object. `predecessors` maps each object to its predecessor, the first object to itself.
fn path_to(predecessors: &HashMap<u32, u32>, to: u32) -> Vec<u32> {
    let mut path = vec![to];
    let mut at = to;
    while let Some(from) = predecessors.get(&at).filter(|from| **from != at) {
        path.push(*from);
        at = *from;
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn graph(references: &[&[u32]]) -> ReferenceGraph {
        let mut graph = ReferenceGraph::default();
        for of in references {
            graph.add_object();
            of.iter().for_each(|other| graph.add_reference(*other));
        }
        graph
    }

    #[test]
    fn only_cycles_that_hold_tensors_are_found() {
        // 0 -> 1 -> 2 -> 0 holds the tensor 3 (1 -> 3), and 4 -> 4 holds it too. 5 -> 3 is no cycle, 6 -> 7 -> 6 holds
        // no tensor, and 8 -> 0 only leads to a cycle.
        let graph = graph(&[&[1], &[2, 3], &[0], &[], &[4, 3], &[3], &[7], &[6], &[0]]);
        let cycles = graph.cycles(|object| object == 3, 100);
        let expected = [
            TensorCycle { members: vec![0, 1, 2], path: vec![1, 2, 0], to_tensor: vec![1, 3], tensors: vec![3] },
            TensorCycle { members: vec![4], path: vec![4], to_tensor: vec![4, 3], tensors: vec![3] },
        ];
        assert_eq!(cycles, expected);
        assert_eq!(graph.nearest_objects(&cycles[0], 3), [1, 2, 0]);
        assert_eq!(graph.cycles(|_| true, 1).len(), 1);
        assert!(graph.cycles(|_| false, 100).is_empty());
    }

    /// The objects of a tree of three nodes (0, 1, 2, each with a tensor) and the list of the root's children, numbered
    /// in every order: the chosen description names the same objects.
    #[test]
    fn the_description_does_not_depend_on_the_order_of_objects() {
        // 0: root, 1 and 2: children, 3: list of children, 4 to 6: tensors.
        let references: [&[u32]; 7] = [&[4, 3], &[5, 0], &[6, 0], &[2, 1], &[], &[], &[]];
        let mut orders = vec![vec![]];
        for object in 0..7_u32 {
            let longer = |order: &Vec<u32>| {
                let insert = |at: usize, order: &Vec<u32>| {
                    let mut order = order.clone();
                    order.insert(at, object);
                    order
                };
                (0..=order.len()).map(|at| insert(at, order)).collect::<Vec<_>>()
            };
            orders = orders.iter().flat_map(longer).collect();
        }
        assert_eq!(orders.len(), 5040);
        for order in orders {
            // `order[n]` is the object with number n.
            let number = |object: &u32| order.iter().position(|o| o == object).unwrap() as u32;
            let renumbered: Vec<Vec<u32>> =
                order.iter().map(|object| references[*object as usize].iter().map(number).collect()).collect();
            let graph = graph(&renumbered.iter().map(|of| &of[..]).collect::<Vec<_>>());
            let is_tensor = |n: u32| order[n as usize] >= 4;
            let cycles = graph.cycles(is_tensor, 10);
            assert_eq!(cycles.len(), 1);
            let objects = |numbers: &[u32]| numbers.iter().map(|n| order[*n as usize]).collect::<Vec<_>>();
            let described = graph.descriptions(&cycles[0], is_tensor);
            assert_eq!(described.len(), 3, "the list is farther from a tensor");
            let chosen = described.iter().map(|c| (objects(&c.path), objects(&c.to_tensor))).min();
            assert_eq!(chosen, Some((vec![0, 3, 2], vec![0, 4])));
        }
    }

    #[test]
    fn a_tensor_can_be_a_member_of_the_cycle() {
        let cycles = graph(&[&[1], &[0]]).cycles(|object| object == 1, 100);
        assert_eq!(
            cycles,
            [TensorCycle { members: vec![0, 1], path: vec![1, 0], to_tensor: vec![1], tensors: vec![1] }]
        );
    }

    /// Compares the components with their definition: two objects are in one component if each reaches the other.
    #[test]
    fn components_are_objects_that_reach_each_other() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let count = 1 + random(12) as u32;
            let references: Vec<Vec<u32>> =
                (0..count).map(|_| (0..random(4)).map(|_| random(count.into()) as u32).collect()).collect();
            let graph = graph(&references.iter().map(|of| &of[..]).collect::<Vec<_>>());
            let reached = |from: u32| {
                let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
                while let Some(object) = next.pop() {
                    next.extend(graph.references_of(object).iter().filter(|other| seen.insert(**other)));
                }
                seen
            };
            let of = graph.components();
            for a in 0..count {
                for b in (0..count).filter(|b| *b != a) {
                    let together = reached(a).contains(&b) && reached(b).contains(&a);
                    assert_eq!(of[a as usize] == of[b as usize], together, "{references:?} {a} {b}");
                }
            }
        }
    }
}
