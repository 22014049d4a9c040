//! The GPUs that a dry run can simulate. `gpus.json` has their figures, each with its source.

use std::sync::OnceLock;

use serde::Deserialize;

/// A model of GPU.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub(crate) struct Gpu {
    /// The name on the command line.
    pub(crate) id: String,
    /// Other names on the command line.
    #[serde(default)]
    pub(crate) aliases: Vec<String>,
    /// The name that CUDA gives.
    pub(crate) name: String,
    /// The memory that a program can use, with its context, in bytes: the total of `cuMemGetInfo`.
    pub(crate) memory_bytes: u64,
    /// The compute capability times ten.
    pub(crate) compute_capability: u32,
    /// The number of multiprocessors.
    pub(crate) multiprocessors: u32,
    /// The size of the L2 cache in bytes.
    pub(crate) l2_cache_bytes: u64,
    /// The number of NVLink links. 0 for cards that are connected by PCI Express alone.
    #[serde(default)]
    pub(crate) nvlinks: u32,
    /// The memory that a CUDA context takes, in bytes.
    pub(crate) context_bytes: u64,
    /// Whether nobody's measurement of this model's `context_bytes` was found, so that it is that of an H200.
    #[serde(default)]
    pub(crate) is_context_assumed: bool,
}

/// The GPU of a dry run that names none.
const DEFAULT: &str = "h100-sxm";

/// How to see all names.
const LIST_ALL: &str = "`memtrace dry-run --list-gpus` prints all";

impl Gpu {
    /// All models, in the order of the table.
    pub(crate) fn all() -> &'static [Gpu] {
        static ALL: OnceLock<Vec<Gpu>> = OnceLock::new();
        ALL.get_or_init(|| serde_json::from_str(include_str!("gpus.json")).expect("a test reads the table"))
    }

    /// The GPU of a dry run that names none.
    pub(crate) fn default_model() -> Gpu {
        Gpu::named(DEFAULT).expect("a test finds the default")
    }

    /// The model with this name, in any letter case, with or without separators.
    ///
    /// # Errors
    ///
    /// A message that names the nearest models, if there is none.
    pub(crate) fn named(text: &str) -> Result<Gpu, String> {
        let plain = |name: &str| name.to_lowercase().replace(['-', '_', ' '], "").replacen("nvidia", "", 1);
        let requested = plain(text);
        let names = |gpu: &'static Gpu| gpu.aliases.iter().chain([&gpu.id, &gpu.name]).map(move |name| (name, gpu));
        if let Some((_, gpu)) = Gpu::all().iter().flat_map(names).find(|(name, _)| plain(name) == requested) {
            return Ok(gpu.clone());
        }
        let mut candidates: Vec<&str> = Vec::new();
        for (name, gpu) in Gpu::all().iter().flat_map(names) {
            if !requested.is_empty() && plain(name).contains(&requested) && !candidates.contains(&&*gpu.id) {
                candidates.push(&gpu.id);
            }
        }
        match &candidates[..] {
            [] => {}
            [only] => return Err(format!("no such GPU; the nearest is {only}. {LIST_ALL}")),
            _ => return Err(format!("several GPUs have this in their names: {}. {LIST_ALL}", candidates.join(", "))),
        }
        let mut near: Vec<(f64, &str)> = Gpu::all()
            .iter()
            .flat_map(names)
            .map(|(name, gpu)| (strsim::jaro_winkler(&plain(name), &requested), &*gpu.id))
            .collect();
        near.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut nearest: Vec<&str> = Vec::new();
        for (_, id) in near {
            if nearest.len() < 3 && !nearest.contains(&id) {
                nearest.push(id);
            }
        }
        Err(format!("no such GPU; the nearest are {}. {LIST_ALL}", nearest.join(", ")))
    }

    /// A GPU of which only the memory is known, in bytes.
    pub(crate) fn of_memory(memory_bytes: u64) -> Gpu {
        Gpu { memory_bytes, context_bytes: 0, name: "a GPU".to_owned(), ..Gpu::default_model() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_any_spelling() {
        for (text, id) in
            [("T4", "t4"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("a100_40gb", "a100-40gb"), ("rtx4090", "rtx-4090")]
        {
            assert_eq!(Gpu::named(text).map(|gpu| gpu.id), Ok(id.to_owned()), "{text}");
        }
        let error = Gpu::named("a100-41gb").unwrap_err();
        assert!(error.contains("a100-40gb"), "{error}");
        assert_eq!(Gpu::named(DEFAULT).unwrap().id, DEFAULT);
        for name in ["A100", "nvidia-a100"] {
            let error = Gpu::named(name).unwrap_err();
            let candidates =
                "several GPUs have this in their names: a100-40gb, a100-40gb-pcie, a100-80gb, a100-80gb-pcie.";
            assert!(error.starts_with(candidates), "{error}");
        }
    }

    /// The analysis knows some models by their names.
    #[test]
    fn the_analysis_has_the_same_multiprocessors() {
        let known = |gpu: &&Gpu| memtrace_analysis::rules::multiprocessors(&gpu.name).is_some();
        assert!(Gpu::all().iter().filter(known).count() > 10);
        for gpu in Gpu::all().iter().filter(known) {
            let count = memtrace_analysis::rules::multiprocessors(&gpu.name);
            assert_eq!(count, Some(gpu.multiprocessors), "{}", gpu.name);
        }
    }

    #[test]
    fn every_name_belongs_to_one_model() {
        let mut names: Vec<&str> =
            Gpu::all().iter().flat_map(|gpu| gpu.aliases.iter().chain([&gpu.id])).map(String::as_str).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(Gpu::all().iter().all(|gpu| gpu.memory_bytes > 4 << 30 && (50..200).contains(&gpu.compute_capability)));
    }
}
