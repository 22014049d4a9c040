//! The place of a process in a distributed job, from the environment variables that its launcher sets.

use memtrace_trace::named;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

named! {
    serde
    /// The source of a rank, in order of precedence.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize, JsonSchema)]
    pub enum RankSource {
        /// The process itself, when it joined its first group of `torch.distributed`. It wins over every variable.
        Torch => "torch",
        /// `RANK`: torchrun, Accelerate, DeepSpeed, Kubeflow's PyTorchJob.
        #[default]
        Rank => "rank",
        /// `SLURM_PROCID`: srun.
        Slurm => "slurm",
        /// `OMPI_COMM_WORLD_RANK`: mpirun of Open MPI.
        OpenMpi => "open_mpi",
        /// `PMIX_RANK`: launchers that use PMIx.
        Pmix => "pmix",
        /// `PMI_RANK`: mpiexec of MPICH and Intel MPI.
        Pmi => "pmi",
        /// `JAX_PROCESS_ID`: the process index of `jax.distributed.initialize`.
        Jax => "jax",
        /// The name of a snapshot's file or of its folder: `rank1.pickle`, `snapshot_1.pickle`, `rank1/a.pickle`.
        FileName => "file_name",
        /// The position of a snapshot among several whose names have no rank.
        FileOrder => "file_order",
    }
}

/// The variables of one launcher. A list has the names that are tried in order.
struct Launcher {
    source: RankSource,
    rank: &'static str,
    local_rank: &'static [&'static str],
    world_size: &'static [&'static str],
    local_world_size: &'static [&'static str],
    node_rank: &'static [&'static str],
}

/// The launchers, in order of precedence. All values come from the launcher whose rank is set first: `srun torchrun`
/// sets `SLURM_NTASKS` to the number of hosts and `WORLD_SIZE` to that of ranks.
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        source: RankSource::Rank,
        rank: "RANK",
        local_rank: &["LOCAL_RANK"],
        world_size: &["WORLD_SIZE"],
        local_world_size: &["LOCAL_WORLD_SIZE"],
        node_rank: &["GROUP_RANK", "NODE_RANK"],
    },
    Launcher {
        source: RankSource::Slurm,
        rank: "SLURM_PROCID",
        local_rank: &["SLURM_LOCALID"],
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_world_size: &[],
        node_rank: &["SLURM_NODEID"],
    },
    Launcher {
        source: RankSource::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        node_rank: &[],
    },
    Launcher {
        source: RankSource::Pmix,
        rank: "PMIX_RANK",
        local_rank: &[],
        world_size: &[],
        local_world_size: &[],
        node_rank: &[],
    },
    Launcher {
        source: RankSource::Pmi,
        rank: "PMI_RANK",
        local_rank: &["MPI_LOCALRANKID"],
        world_size: &["PMI_SIZE"],
        local_world_size: &["MPI_LOCALNRANKS"],
        node_rank: &[],
    },
    Launcher {
        source: RankSource::Jax,
        rank: "JAX_PROCESS_ID",
        local_rank: &[],
        world_size: &["JAX_NUM_PROCESSES"],
        local_world_size: &[],
        node_rank: &[],
    },
];

/// The place of a process in a job, as its environment has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankVariables {
    source: Option<RankSource>,
    rank: u32,
    /// The rank on its host.
    pub local_rank: Option<u32>,
    /// The number of ranks of the job.
    pub world_size: Option<u32>,
    /// The number of ranks on the host.
    pub local_world_size: Option<u32>,
    /// The number of the host in the job.
    pub node_rank: Option<u32>,
}

impl RankVariables {
    /// Reads the variables of the first launcher that has set a rank. Without one, those of torchrun, of which some
    /// programs set only a few. `None` if there are none at all.
    pub fn of(env: &BTreeMap<String, String>) -> Option<RankVariables> {
        let number = |name: &str| env.get(name)?.trim().parse::<u32>().ok();
        let first = |names: &[&str]| names.iter().find_map(|name| number(name));
        let launcher = LAUNCHERS.iter().find(|launcher| number(launcher.rank).is_some());
        let names = launcher.unwrap_or(&LAUNCHERS[0]);
        let variables = RankVariables {
            source: launcher.map(|launcher| launcher.source),
            rank: number(names.rank).unwrap_or(0),
            local_rank: first(names.local_rank).or_else(|| number("LOCAL_RANK")),
            world_size: first(names.world_size),
            local_world_size: first(names.local_world_size),
            node_rank: first(names.node_rank),
        };
        (variables != RankVariables::default()).then_some(variables)
    }

    /// The rank and its source; `None` if no variable has a rank.
    pub fn rank_and_source(&self) -> Option<(u32, RankSource)> {
        self.source.map(|source| (self.rank, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Option<RankVariables> {
        RankVariables::of(&variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn all_values_come_from_one_launcher() {
        let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0"), ("SLURM_NODEID", "1")];
        let found = read(&srun).unwrap();
        assert_eq!(found.rank_and_source(), Some((1, RankSource::Slurm)));
        assert_eq!((found.local_rank, found.world_size, found.node_rank), (Some(0), Some(2), Some(1)));
        let torchrun = [("RANK", "11"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8")];
        let found = read(&[&srun[..], &torchrun[..]].concat()).unwrap();
        assert_eq!(found.rank_and_source(), Some((11, RankSource::Rank)));
        assert_eq!((found.local_rank, found.world_size, found.node_rank), (Some(3), Some(16), None));
        assert_eq!(found.local_world_size, Some(8));
    }

    #[test]
    fn names_are_those_of_the_json() {
        for source in RankSource::ALL {
            assert_eq!(serde_json::to_value(source).unwrap(), source.name());
            assert_eq!(RankSource::from_name(source.name()), Some(source));
        }
    }

    #[test]
    fn every_launcher_is_read_and_the_first_wins() {
        let mut all: Vec<(&str, &str)> = LAUNCHERS.iter().map(|launcher| (launcher.rank, "5")).collect();
        for launcher in &LAUNCHERS {
            assert_eq!(read(&all).unwrap().rank_and_source(), Some((5, launcher.source)));
            all.remove(0);
        }
        assert_eq!(read(&all), None);
        assert_eq!(read(&[("RANK", "x"), ("PMI_RANK", "2")]).unwrap().rank_and_source(), Some((2, RankSource::Pmi)));
        let local = read(&[("LOCAL_RANK", "1")]).unwrap();
        assert_eq!((local.rank_and_source(), local.local_rank), (None, Some(1)));
    }
}
