//! Names a run's processes, for file names and for text: `rank3`, or the process id.
//!
//! Processes inherit a rank like any environment variable, so several can claim the same rank. It belongs to the
//! process that reported it to PyTorch, else to the process that started the others. The others get both numbers:
//! `rank3-4242`. If several owners remain (such as a restarted worker), all get both numbers.

use std::collections::{BTreeMap, HashSet};

use super::process::Process;

/// The facts about a process that decide its name. Several processes can claim the same rank. Tests construct this
/// directly.
#[derive(Clone, Copy)]
struct RankClaim {
    rank: Option<u32>,
    /// Whether it reported its rank to PyTorch.
    has_reported_rank: bool,
    pid: u32,
    parent: Option<u32>,
}

/// A unique name for each process.
pub(super) fn process_names(processes: &[Process]) -> Vec<String> {
    // A snapshot identifies its process only by its file name.
    if let [only] = processes
        && only.pid() == 0
        && let Some(name) = only.path().file_name()
    {
        let name = name.to_string_lossy();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        return vec![name.rsplit_once('.').map_or(name, |(stem, _)| stem).to_owned()];
    }
    let claims = processes.iter().map(|p| RankClaim {
        rank: p.rank(),
        has_reported_rank: p.definitions().rank.is_some(),
        pid: p.pid(),
        parent: p.info().ppid,
    });
    names_of_claims(&claims.collect::<Vec<_>>())
}

fn names_of_claims(claims: &[RankClaim]) -> Vec<String> {
    // A run can have tens of thousands of processes, all with the rank that they inherited.
    let mut claims_of_rank: BTreeMap<u32, Vec<&RankClaim>> = BTreeMap::new();
    for claim in claims {
        if let Some(rank) = claim.rank {
            claims_of_rank.entry(rank).or_default().push(claim);
        }
    }
    let owner = |all: &[&RankClaim]| {
        let pids: HashSet<u32> = all.iter().map(|claim| claim.pid).collect();
        let first = |c: &&&RankClaim| !c.parent.is_some_and(|parent| pids.contains(&parent));
        let [reporters, starters] =
            [all.iter().filter(|c| c.has_reported_rank).collect::<Vec<_>>(), all.iter().filter(first).collect()];
        match (&reporters[..], &starters[..]) {
            ([one], _) | ([], [one]) => Some(one.pid),
            // All reported it: forked children inherit what their parent reported.
            (several, [one]) if several.len() == all.len() => Some(one.pid),
            _ => None,
        }
    };
    let owners: BTreeMap<u32, Option<u32>> = claims_of_rank.iter().map(|(rank, all)| (*rank, owner(all))).collect();
    let mut taken: BTreeMap<String, u32> = BTreeMap::new();
    let name = |claim: &RankClaim| {
        let name = match claim.rank {
            Some(rank) if owners.get(&rank).copied().flatten() == Some(claim.pid) => format!("rank{rank}"),
            Some(rank) => format!("rank{rank}-{}", claim.pid),
            None => claim.pid.to_string(),
        };
        // A process that replaced itself (`exec`) has several recordings.
        let earlier = taken.entry(name.clone()).or_default();
        *earlier += 1;
        if *earlier == 1 { name } else { format!("{name}.{}", *earlier - 1) }
    };
    claims.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(rank: Option<u32>, has_reported_rank: bool, pid: u32, parent: u32) -> RankClaim {
        RankClaim { rank, has_reported_rank, pid, parent: Some(parent) }
    }

    #[test]
    fn a_rank_belongs_to_the_process_that_reported_it_or_started_the_others() {
        let workers = [claim(Some(0), true, 10, 1), claim(Some(0), false, 12, 11), claim(Some(1), true, 13, 1)];
        assert_eq!(names_of_claims(&workers), ["rank0", "rank0-12", "rank1"]);
        let inherited = [claim(Some(0), false, 10, 1), claim(Some(0), false, 12, 10), claim(None, false, 9, 1)];
        assert_eq!(names_of_claims(&inherited), ["rank0", "rank0-12", "9"]);
        let forked = [claim(Some(3), true, 10, 1), claim(Some(3), true, 12, 10)];
        assert_eq!(names_of_claims(&forked), ["rank3", "rank3-12"]);
        let restarted = [claim(Some(0), true, 10, 1), claim(Some(0), true, 20, 1)];
        assert_eq!(names_of_claims(&restarted), ["rank0-10", "rank0-20"]);
        let replaced = [claim(Some(0), false, 10, 1), claim(Some(0), false, 10, 1), claim(None, false, 7, 1)];
        assert_eq!(names_of_claims(&replaced), ["rank0-10", "rank0-10.1", "7"]);
    }
}
