//! The job to which a process belongs: what the launchers of distributed jobs leave in the environment.

use memtrace_trace::named;
use std::collections::BTreeMap;
use std::fmt;

named! {
    /// Where a job's id comes from, in order of precedence. The names are the variables or the option that gave the id.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum JobIdSource {
        /// `memtrace run --job`, or the variable `MEMTRACE_JOB`.
        Named => "--job",
        /// `SLURM_JOB_ID`, with the step of `srun`.
        Slurm => "SLURM_JOB_ID",
        /// `TORCHELASTIC_RUN_ID`: the rendezvous id of torchrun.
        Torchrun => "TORCHELASTIC_RUN_ID",
        /// `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid`: the job of `mpirun`.
        Mpi => "mpirun",
        /// `RAY_JOB_ID`.
        Ray => "RAY_JOB_ID",
        /// `MASTER_ADDR` and `MASTER_PORT`: the address at which the ranks meet. Jobs that follow each other can share
        /// it.
        Rendezvous => "MASTER_ADDR",
        /// Nothing says more: the run is a job by itself.
        Run => "run folder",
    }
}

/// The id of a job.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobId {
    /// The source of the id.
    pub source: JobIdSource,
    /// The id itself.
    pub id: String,
}

impl JobId {
    /// The job of a process. `named` is the id that the user gave its run, and `host` the name of its host.
    ///
    /// `None` if the environment names no job.
    pub fn of_process(named: Option<&str>, env: &BTreeMap<String, String>, host: &str) -> Option<JobId> {
        let value = |name: &str| env.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let job = |source, id: &str| Some(JobId { source, id: id.to_owned() });
        if let Some(id) = named.filter(|id| !id.is_empty()) {
            return job(JobIdSource::Named, id);
        }
        if let Some(id) = value("SLURM_JOB_ID") {
            // The steps of a job are separate programs. A batch script without `srun` has no step.
            let step = value("SLURM_STEP_ID").map(|step| format!(".{step}")).unwrap_or_default();
            return job(JobIdSource::Slurm, &format!("{id}{step}"));
        }
        // torchrun without a rendezvous id calls every job `none`.
        if let Some(id) = value("TORCHELASTIC_RUN_ID").filter(|id| *id != "none") {
            return job(JobIdSource::Torchrun, id);
        }
        if let Some(id) = value("PMIX_NAMESPACE").or_else(|| value("OMPI_MCA_ess_base_jobid")) {
            return job(JobIdSource::Mpi, id);
        }
        // Ray starts workers before they have a job.
        if let Some(id) = value("RAY_JOB_ID").filter(|id| *id != "ffffffff") {
            return job(JobIdSource::Ray, id);
        }
        let address = value("MASTER_ADDR")?;
        let port = value("MASTER_PORT").map(|port| format!(":{port}")).unwrap_or_default();
        // Each host has an address of this name.
        let is_local = address == "localhost" || address == "::1" || address.starts_with("127.");
        let host = if is_local { format!("{host}/") } else { String::new() };
        job(JobIdSource::Rendezvous, &format!("{host}{address}{port}"))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.source.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(named: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        let env = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        JobId::of_process(named, &env, "node7").map(|job| job.to_string())
    }

    #[test]
    fn the_most_specific_variable_names_the_job() {
        let rendezvous = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        let with = |more: &[(&'static str, &'static str)]| [&rendezvous[..], more].concat();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(job(None, &[]), None);
        assert_eq!(job(None, &rendezvous), text("10.0.0.1:29500 (MASTER_ADDR)"));
        assert_eq!(job(None, &[("MASTER_ADDR", "127.0.0.1")]), text("node7/127.0.0.1 (MASTER_ADDR)"));
        assert_eq!(job(None, &with(&[("TORCHELASTIC_RUN_ID", "none")])), text("10.0.0.1:29500 (MASTER_ADDR)"));
        assert_eq!(job(None, &with(&[("TORCHELASTIC_RUN_ID", "gpt")])), text("gpt (TORCHELASTIC_RUN_ID)"));
        let slurm = with(&[("TORCHELASTIC_RUN_ID", "gpt"), ("SLURM_JOB_ID", "71"), ("SLURM_STEP_ID", "0")]);
        assert_eq!(job(None, &slurm), text("71.0 (SLURM_JOB_ID)"));
        assert_eq!(job(None, &slurm[..4]), text("71 (SLURM_JOB_ID)"));
        assert_eq!(job(Some("mine"), &slurm), text("mine (--job)"));
        assert_eq!(job(Some(""), &[("PMIX_NAMESPACE", "prte-1@1")]), text("prte-1@1 (mpirun)"));
        assert_eq!(job(None, &[("RAY_JOB_ID", "ffffffff")]), None);
        assert_eq!(job(None, &[("RAY_JOB_ID", "01000000")]), text("01000000 (RAY_JOB_ID)"));
    }
}
