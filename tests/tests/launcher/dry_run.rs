//! `memtrace dry-run`: a simulated GPU for an unmodified program.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::programs::linked_with;
use memtrace_tests::traced_program::{python, root};
use memtrace_tests::versions::Versions;
use serde_json::Value;

use crate::launcher_support::*;

/// A dry run of `tests/programs/launcher/dry_run.py`, in a folder.
fn dry_run(folder: &Path, options: &[&str], argument: &str) -> Output {
    dry_run_of("dry_run.py", folder, options, &[argument])
}

/// A dry run of a program of `tests/programs/launcher`, in a folder.
fn dry_run_of(program: &str, folder: &Path, options: &[&str], arguments: &[&str]) -> Output {
    output(&mut dry_run_command(program, folder, options, arguments))
}

fn dry_run_command(program: &str, folder: &Path, options: &[&str], arguments: &[&str]) -> Command {
    // For the Python of the test environment.
    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(folder).arg(memtrace()).arg("dry-run").args(options);
    command.arg("--").arg(python()).arg(root().join("tests/programs/launcher").join(program)).args(arguments);
    command
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(bytes)))
}

#[test]
fn the_report_is_that_of_a_gpu_which_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run(folder.path(), &["--gpu", "T4", "-o", "run"], "4");
    let all = stderr(&output);
    // The first use of the test environment prints lines of its own.
    let lines: Vec<&str> = all.lines().filter(|line| !line.starts_with("scripts/sim: ")).collect();
    let report = lines.join("\n");
    assert!(output.status.success(), "{report}");
    assert!(
        report.starts_with("Dry run on Tesla T4 (14.6 GiB), simulated: no GPU was used, no kernel ran.\n+ Finished"),
        "{report}"
    );
    let theirs = json(&output.stdout);
    assert_eq!(theirs["name"], "Tesla T4");
    let runtimes = theirs["runtimes"].as_array().unwrap();
    assert!(!runtimes.is_empty() && runtimes.iter().all(|r| r.as_str().unwrap().contains("/simulated-")), "{theirs}");

    let run = folder.path().join("run");
    let summary = json(&std::fs::read(run.join("summary.json")).unwrap());
    assert_eq!(
        summary["run"]["simulated"],
        serde_json::json!({"gpu": "Tesla T4", "memory_bytes": 15_637_086_208_u64, "count": 1})
    );
    let device = &summary["processes"][0]["devices"][0];
    assert_eq!(device["highest"]["allocated_bytes"], theirs["peak"]);
    assert_eq!(device["total_bytes"], 15_637_086_208_u64);
    assert_every_byte_in_use_has_a_name(&device["device_memory"], &theirs);
    assert!(!run.join(".simulated").exists());
}

/// No process but this one uses the device, and the simulation knows what the context takes.
#[track_caller]
fn assert_every_byte_in_use_has_a_name(memory: &Value, theirs: &Value) {
    let gpus = json(include_bytes!("../../../launcher/src/simulation/gpus.json"));
    let t4 = gpus.as_array().unwrap().iter().find(|gpu| gpu["name"] == "Tesla T4").unwrap();
    assert_eq!(memory["other_processes"], "none");
    let end = &memory["at_end"];
    let part = |kind: &str| -> u64 {
        let parts = end["parts"].as_array().unwrap().iter().filter(|part| part["kind"] == kind);
        parts.map(|part| part["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!(end["used_bytes"], theirs["used"], "{end}");
    let expected = (&t4["context_bytes"], 0, 0);
    assert_eq!((&part("context").into(), part("unattributed"), part("context_and_other_processes")), expected, "{end}");
    let beside_pytorch = theirs["used"].as_u64().unwrap() - theirs["reserved"].as_u64().unwrap();
    let named = part("context") + part("kernels") + part("library") + part("rounding");
    assert_eq!(named, beside_pytorch, "{end}");
    assert!(part("kernels") > 0, "{end}");
}

#[test]
fn processes_share_the_memory_of_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run_of("dry_run_processes.py", folder.path(), &["--gpu", "t4", "-o", "run"], &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let free: Vec<u64> = serde_json::from_value(json(&output.stdout)["free_bytes"].clone()).unwrap();
    let context_bytes = 15_637_086_208 - free[0];
    assert!(context_bytes > 0);
    assert_eq!(free[1], free[0] - context_bytes - (1 << 30), "another context, and what the process allocated");
    assert_eq!(free[2], free[0], "a killed process uses nothing");
}

/// Runs a model on a mesh of so many ranks with tensor parallelism and FSDP2. Each rank gets the same share of it.
fn run_node(ranks: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(root().join("scripts/sim"));
    let count = ranks.to_string();
    command.current_dir(folder.path()).arg(memtrace()).args(["dry-run", "--gpu", "t4", "--gpus", &count, "--quiet"]);
    command.args(["--", python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &count]);
    let output = output(command.arg(root().join("tests/programs/launcher/dry_run_node.py")));
    assert!(output.status.success(), "{}", stderr(&output));
    let results: Vec<Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| json(line.as_bytes())).collect();
    assert_eq!(results.len() as u64, ranks, "{results:?}");
    let (whole, sharded) = (results[0]["whole"].as_u64().unwrap(), results[0]["sharded"].as_u64().unwrap());
    // A part of the parameters, of their gradients and of their state, and one block that is gathered.
    assert!(whole / ranks < sharded && sharded < whole / ranks + whole / 4, "{sharded} of {whole}");
    for result in &results {
        assert_eq!((&result["sharded"], &result["can_access_peers"]), (&sharded.into(), &true.into()), "{result}");
    }
}

#[test]
fn ranks_exchange_messages_and_share_a_model() {
    run_node(4);
}

#[test]
fn a_rank_that_waits_for_one_that_left_gets_an_error_of_nccl() {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run_of("dry_run_lost_rank.py", folder.path(), &["--gpus", "2", "--quiet", "-o", "run"], &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("remote process exited") && text.contains("the process of rank 1 has ended"), "{text}");
}

mod exhaustive {
    use super::*;

    #[test]
    fn eight_ranks_share_a_model() {
        run_node(8);
    }

    /// The report has the peak that a release of PyTorch counts itself, and the workspaces that were measured.
    #[track_caller]
    fn check_release(versions: Versions) {
        let folder = tempfile::tempdir().unwrap();
        let run = |program: &str, argument: &str| {
            let mut command = dry_run_command(program, folder.path(), &["--gpu", "h100", "-o", program], &[argument]);
            let output = output(command.env("SIM_TORCH", versions.torch).env("SIM_PYTHON", versions.python));
            assert!(output.status.success(), "{versions:?}: {}", stderr(&output));
            let summary = json(&std::fs::read(folder.path().join(program).join("summary.json")).unwrap());
            (output.stdout, summary)
        };
        let (theirs, summary) = run("dry_run.py", "4");
        let theirs = json(&theirs);
        assert_eq!(summary["processes"][0]["devices"][0]["highest"]["allocated_bytes"], theirs["peak"], "{versions:?}");
        let (_, summary) = run("convolution.py", "16");
        assert_eq!(summary["run"]["simulated"]["workspaces"]["estimated"], 0, "{versions:?}");
    }

    memtrace_tests::for_each_version! { mod versions: check_release }
}

#[test]
fn the_range_of_estimated_workspaces_of_cudnn_is_in_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let workspaces = |arguments: &[&str]| {
        let name = arguments.join("-");
        let output = dry_run_of("convolution.py", folder.path(), &["--gpu", "h100", "-o", &name], arguments);
        let summary = json(&std::fs::read(folder.path().join(&name).join("summary.json")).unwrap());
        assert!(!folder.path().join(&name).join(".simulated").exists());
        (stderr(&output), summary["run"]["simulated"]["workspaces"].clone())
    };
    let sentence = "convolutions are estimates: on a GPU,";
    // This convolution was measured for 16 images.
    let (report, measured) = workspaces(&["16"]);
    assert!(!report.contains(sentence), "{report}");
    assert_eq!(measured, serde_json::json!({"convolutions": 3, "estimated": 0, "above_bytes": 0, "below_bytes": 0}));
    let (report, estimated) = workspaces(&["24"]);
    let report = report.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(report.contains(&format!("cuDNN workspaces of 3 of 3 {sentence} the peak can be")), "{report}");
    assert_eq!((&estimated["convolutions"], &estimated["estimated"]), (&Value::from(3), &Value::from(3)));
    assert!(estimated["above_bytes"].as_u64() > Some(1 << 20), "{estimated}");
    let (_, tried) = workspaces(&["24", "benchmark"]);
    assert_eq!((&tried["convolutions"], &tried["estimated"]), (&Value::from(3), &Value::from(3)));
    assert!(tried["above_bytes"].as_u64() > estimated["above_bytes"].as_u64(), "{tried}");
}

#[test]
fn values_are_tried_and_the_largest_that_fits_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let tries = |options: &[&str]| {
        let output = dry_run(folder.path(), &[&["--memory", "512MiB", "--json"], options].concat(), "{bs}");
        (output.status.code().unwrap(), json(&output.stdout))
    };
    let (code, varied) = tries(&["--vary", "bs=64,1", "--jobs", "2", "-o", "varied"]);
    assert_eq!(code, 0, "{varied}");
    let results: Vec<(u64, &Value)> = varied["tries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["value"].as_u64().unwrap(), &one["result"]))
        .collect();
    assert_eq!(results[0], (1, &Value::from("fits")));
    assert_eq!(results[1].0, 64);
    let oom = &results[1].1["out_of_memory"];
    assert!(
        oom["requested_bytes"].as_u64() > Some(0) && oom["location"].as_str().unwrap().contains("dry_run.py:"),
        "{oom}"
    );

    let (code, searched) = tries(&["--max", "bs=1:20", "-o", "searched"]);
    assert_eq!(code, 0, "{searched}");
    let largest = searched["largest"].as_u64().unwrap();
    let try_of = |value: u64| {
        let tries = searched["tries"].as_array().unwrap();
        tries.iter().find(|one| one["value"] == value).unwrap_or_else(|| panic!("no try of {value}: {searched}"))
    };
    let result_of = |value: u64| try_of(value)["result"].clone();
    assert_eq!(result_of(largest), "fits");
    let oom = result_of(largest + 1)["out_of_memory"].clone();
    assert!(oom.is_object(), "{searched}");

    // The table has the answer, its margin, and what the next value dies of.
    let range = format!("bs={largest}:{}", largest + 1);
    let output = dry_run(folder.path(), &["--memory", "512MiB", "--max", &range, "-o", "printed"], "{bs}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answer = text.split_once(&format!("The largest that fits: bs={largest}, with ")).expect(&text).1;
    let (margin, rest) = answer.split_once(" to spare\n").expect(&text);
    let has_margin = try_of(largest)["worst"]["free_bytes"].as_u64().unwrap() > 0;
    assert_eq!((margin.ends_with("iB"), margin == "0"), (has_margin, !has_margin), "{text}");
    let location = oom["location"].as_str().unwrap();
    assert!(rest.starts_with(&format!("bs={} would run out of memory in ", largest + 1)), "{text}");
    assert!(rest.contains(location), "{text}");
    let bar = |value: u64| text.lines().find(|line| line.trim_start().starts_with(&format!("{value} "))).unwrap();
    assert!(bar(largest).contains('#') && bar(largest).contains("fits, peak in "), "{text}");
}

#[test]
fn a_program_error_ends_the_tries() {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run(folder.path(), &["--vary", "bs=2,3", "-o", "tries"], "x{bs}");
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("the program failed with bs=2") && text.contains("invalid literal for int()"), "{text}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("the program failed with exit code 1"));
    assert!(!folder.path().join("tries/bs-3").exists());
    let output = dry_run(folder.path(), &["--max", "bs=2:3", "--json", "-o", "searched"], "x{bs}");
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output.stdout);
    assert_eq!(report["tries"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!((&report["tries"][0]["result"]["program_failed"], &report["largest"]), (&1.into(), &Value::Null));
    // The folder has the program's output, and a second search does not mix with the first.
    assert_eq!(std::fs::metadata(folder.path().join("tries")).unwrap().permissions().mode() & 0o777, 0o700);
    let again = dry_run(folder.path(), &["--vary", "bs=2", "-o", "tries"], "{bs}");
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("not empty"), "{}", stderr(&again));
}

#[test]
fn extensions_of_other_packages_find_what_they_import() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("site-packages/package");
    std::fs::create_dir_all(&package).unwrap();
    let (runtime, versions) = (folder.path().join("libcudart.so.13"), folder.path().join("versions.map"));
    std::fs::write(&versions, "libcudart.so.13 { global: cuda*; };").unwrap();
    let shared = ["-shared", "-fPIC"];
    let script = format!("-Wl,--version-script={}", versions.display());
    compile(
        "dry_run_extension.c",
        &runtime,
        &[&shared[..], &["-DRUNTIME", "-Wl,-soname,libcudart.so.13", &script]].concat(),
    );
    let extension = package.join("extension.so");
    compile("dry_run_extension.c", &extension, &[&shared[..], &[runtime.to_str().unwrap()]].concat());
    std::fs::remove_file(&runtime).unwrap();

    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(&folder).env("PYTHONPATH", folder.path().join("site-packages")).arg(memtrace());
    let program = format!("import ctypes; print(ctypes.CDLL('{}').call())", extension.display());
    let output = output(command.args(["dry-run", "-o", "run", "--", python(), "-c", &program]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{}", stderr(&output));
}

#[test]
fn functions_that_the_simulation_lacks_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("site-packages/package");
    std::fs::create_dir_all(&package).unwrap();
    let extension = package.join("extension.so");
    let runtime = linked_with("libcudart.so.13");
    let options: Vec<&str> = ["-shared", "-fPIC"].into_iter().chain(runtime.iter().map(String::as_str)).collect();
    compile("dry_run_stubs.c", &extension, &options);

    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(&folder).env("PYTHONPATH", folder.path().join("site-packages")).arg(memtrace());
    let program = format!(
        "import ctypes, torch; torch.ones(8, device='cuda'); s = (ctypes.c_int * 5)(); \
         print(ctypes.CDLL('{}').call(s), list(s))",
        extension.display()
    );
    let output = output(command.args(["dry-run", "-o", "run", "--", python(), "-c", &program]));
    let report = stderr(&output);
    // A function without results succeeds, another returns CUDA_ERROR_NOT_SUPPORTED. A lookup finds neither:
    // CUDA_ERROR_NOT_FOUND, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1 [0, 0, 801, 500, 1]\n", "{report}");
    let sentence = "The simulation lacks 2 functions that the program called: cuNewSet (2 calls), cuNewGet. Memory";
    assert!(report.split_whitespace().collect::<Vec<_>>().join(" ").contains(sentence), "{report}");
    let summary = json(&std::fs::read(folder.path().join("run/summary.json")).unwrap());
    assert_eq!(
        summary["run"]["simulated"]["missing_functions"],
        serde_json::json!([{"name": "cuNewSet", "calls": 2}, {"name": "cuNewGet", "calls": 1}])
    );
}

#[test]
fn kernels_that_are_not_compiled_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, nvcc: &[(&str, &Path)]| {
        let mut command = dry_run_command("dry_run_kernels.py", folder.path(), &["-o", name], &[]);
        command.env("PYTHONPATH", root().join("tests/programs/launcher/packages"));
        command.env_remove("CUDA_HOME").env_remove("CUDA_PATH").envs(nvcc.iter().copied());
        let output = output(&mut command);
        let summary = json(&std::fs::read(folder.path().join(name).join("summary.json")).unwrap());
        let report = stderr(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        (json(&output.stdout), report, summary["run"]["simulated"]["missing_functions"].clone())
    };
    let sentence = "Kernels of FlashInfer were not compiled, because nvcc is missing: ";
    let (found, report, missing) = run("without", &[]);
    assert_eq!(found, serde_json::json!({"tokens": [500, 500, 500], "left_out": "deep_gemm"}), "{report}");
    assert!(
        report.contains(&format!("{sentence}sampling.top_p_sampling_from_probs (2 calls), sampling.softmax.")),
        "{report}"
    );
    let cutlass = "Kernels of CUTLASS's Python DSL were not compiled, because no kernel runs: Gemm, reduce. Memory";
    assert!(report.contains(cutlass), "{report}");
    let mut names: Vec<_> = missing.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    let of_flashinfer = ["flashinfer.sampling.softmax", "flashinfer.sampling.top_p_sampling_from_probs"];
    let others = [&["cutlass.Gemm", "cutlass.reduce", "deep_gemm.all"][..], &of_flashinfer].concat();
    assert_eq!(names, [&others[..], &["sglang.fused_rope.run", "sglang.norm.run"]].concat());
    let sglang = "Kernels of SGLang were not compiled, because nvcc is missing: fused_rope.run, norm.run. Memory";
    assert!(report.contains(sglang), "{report}");
    let left_out = "Kernels of DeepGEMM were left out for other ones, because the CUDA toolkit is missing: all.";
    assert!(report.contains(left_out), "{report}");
    // Where there is an nvcc, the error is the program's own.
    let bin = folder.path().join("cuda/bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::write(bin.join("nvcc"), "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(bin.join("nvcc"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (found, report, missing) = run("with", &[("CUDA_HOME", &folder.path().join("cuda"))]);
    assert!(found["error"].as_str().unwrap().starts_with("Could not find nvcc"), "{found}");
    assert!(found["left_out"].is_null() && !report.contains(left_out), "{found}");
    assert!(!report.contains(sentence) && report.contains(cutlass), "{report}: {missing}");
}

/// A server's parent process asks NVML for the GPUs. It must not initialize CUDA, or its forked child cannot.
#[track_caller]
fn check_forked_server(gpu: &str, capability: [u32; 2], has_nvlink: bool) {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run_of("dry_run_fork.py", folder.path(), &["--gpu", gpu, "-o", "run"], &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let found = json(&output.stdout);
    assert_eq!((&found["devices"], &found["is_available"]), (&1.into(), &true.into()), "{found}");
    let nvml = &found["nvml"];
    assert_eq!(nvml["capability"], serde_json::json!(capability), "{found}");
    assert_eq!((&nvml["count"], &nvml["level"]), (&1.into(), &0.into()), "{found}");
    assert_eq!((&nvml["has_nvlink"], &nvml["has_unknown"]), (&has_nvlink.into(), &false.into()), "{found}");
    assert_eq!(found["exit"], 0, "{}", stderr(&output));
    assert_eq!(
        found["child"],
        serde_json::json!({"capability": capability, "allocated": 1 << 20, "sum": 1 << 20}),
        "{found}"
    );
}

#[test]
fn a_forked_process_uses_cuda_after_its_parent_asked_nvml() {
    check_forked_server("a100-40gb", [8, 0], true);
    check_forked_server("l40s", [8, 9], false);
}

#[test]
fn a_program_without_python_runs() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let options = linked_with("libcudart.so.13");
    compile("dry_run.c", &program, &options.iter().map(String::as_str).collect::<Vec<_>>());
    let mut command = Command::new(memtrace());
    command.current_dir(&folder).env("PATH", "").args(["dry-run", "--gpu", "t4", "-o", "run", "--"]).arg(program);
    let output = output(&mut command);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "15637086208\n", "{}", stderr(&output));
    let summary = json(&std::fs::read(folder.path().join("run/summary.json")).unwrap());
    assert_eq!(summary["processes"][0]["devices"][0]["total_bytes"], 15_637_086_208_u64);
}

#[test]
fn bad_input_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let run = |options: &[&str]| {
        let output = output(Command::new(memtrace()).current_dir(&folder).arg("dry-run").args(options));
        (output.status.code().unwrap(), stderr(&output))
    };
    let (code, message) = run(&["--gpu", "a100-41gb", "--", "true"]);
    assert_eq!(code, 2);
    assert!(message.contains("the nearest are a100-40gb"), "{message}");
    let (code, message) = run(&["--vary", "bs=1,2", "--", "true", "{batch}"]);
    assert_eq!(code, 2);
    assert!(message.contains("error: the command has no {bs}") && message.contains("help: "), "{message}");
    for options in [&["--json"][..], &["--vary", "bs=1", "--holders"], &["--vary", "bs=1", "--max", "bs=1:2"]] {
        let (code, message) = run(&[options, &["--", "true", "{bs}"]].concat());
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("Usage:"), "{message}");
    }
    for options in [["--memory", "1MiB"], ["--max", "bs=9:1"], ["--vary", "bs="], ["--gpus", "0"]] {
        let (code, message) = run(&[&options[..], &["--", "true"]].concat());
        assert_eq!(code, 2, "{message}");
        assert!(message.contains("--help"), "{message}");
    }
}

#[test]
fn a_dry_run_in_which_nothing_uses_cuda_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, program: &str| {
        let mut command = Command::new(root().join("scripts/sim"));
        command.current_dir(&folder).arg(memtrace()).args(["dry-run", "-o", name, "--", python(), "-c", program]);
        stderr(&output(&mut command))
    };
    let unused = run("cpu", "import torch; torch.zeros(1000).sum()");
    assert!(
        unused.contains("warning: no process of the command used CUDA\nmemtrace: help: move the model"),
        "{unused}"
    );
    // Another problem than where the model is.
    for (name, program) in [("syntax", "def"), ("file", "open('missing')"), ("module", "import missing")] {
        let failed = run(name, program);
        assert!(failed.contains("nothing recorded") && !failed.contains("move the model"), "{failed}");
    }
    let used = run("context", "import torch; torch.cuda.mem_get_info()");
    assert!(used.contains("nothing recorded") && !used.contains("warning: "), "{used}");
}

/// On two H200, a thread that queries an event of GPU 1 and waits for it makes no context on GPU 0.
#[test]
fn gpus_that_pci_express_connects_have_peer_access_unless_they_are_geforce_cards() {
    let folder = tempfile::tempdir().unwrap();
    for (gpu, found) in [("rtx-4090", "False 0 True\n"), ("l40s", "True 0 True\n"), ("h100-sxm", "True 0 True\n")] {
        let output = dry_run_of("dry_run_peers.py", folder.path(), &["--gpu", gpu, "--gpus", "2", "-o", gpu], &[]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), found, "{gpu}: {}", stderr(&output));
    }
}

#[test]
fn a_missing_cuda_toolkit_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, program: &str| {
        let mut command = Command::new(root().join("scripts/sim"));
        command.env_remove("CUDA_HOME").env_remove("CUDA_PATH");
        command.current_dir(&folder).arg(memtrace()).args(["dry-run", "-o", name, "--", python(), "-c", program]);
        stderr(&output(&mut command))
    };
    let search = "import torch, traceback\ndef find_cuda_home():\n    assert False\n";
    let sentence = "the program needs the CUDA toolkit, which this machine lacks (AssertionError at <string>:3)";
    let uncaught = run("uncaught", &format!("{search}find_cuda_home()"));
    assert!(uncaught.contains(sentence) && uncaught.contains("help: set CUDA_HOME"), "{uncaught}");
    assert!(!uncaught.contains("no process of the command used CUDA"), "{uncaught}");
    // A worker of a server logs the exception, and another process ends the program.
    let logged = "try:\n    find_cuda_home()\nexcept AssertionError:\n    traceback.print_exc()\n";
    let failed = run("logged", &format!("{search}{logged}raise SystemExit(1)"));
    assert!(failed.contains(sentence), "{failed}");
    let healthy = run("healthy", &format!("{search}{logged}"));
    assert!(!healthy.contains(sentence), "{healthy}");
    let other = run("other", "import torch\nassert torch.ones(2, device='cuda').sum().item() < 0");
    assert!(other.contains("computes no values") && !other.contains("CUDA toolkit"), "{other}");
}

#[test]
fn a_program_into_which_nothing_can_be_preloaded_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    compile("process_state.c", &program, &["-static"]);
    let output =
        output(Command::new(memtrace()).current_dir(&folder).args(["dry-run", "-o", "run", "--"]).arg(program));
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{message}");
    assert!(
        message.contains("it is statically linked") && message.contains("help: run a dynamically linked"),
        "{message}"
    );
    assert!(!folder.path().join("run").exists());
}

#[test]
fn a_pytorch_without_cuda_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let torch = folder.path().join("packages/torch");
    std::fs::create_dir_all(torch.join("lib")).unwrap();
    std::fs::write(torch.join("__init__.py"), "").unwrap();
    std::fs::write(torch.join("version.py"), "__version__ = '2.11.0+cpu'\ncuda = None\n").unwrap();
    let mut command = Command::new(memtrace());
    command.current_dir(&folder).env("PYTHONPATH", folder.path().join("packages"));
    let output = output(command.args(["dry-run", "-o", "run", "--", python(), "-c", "pass"]));
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{message}");
    assert!(
        message.contains("cannot simulate CUDA for the PyTorch in")
            && message.contains("help: install a PyTorch with CUDA"),
        "{message}"
    );
}
