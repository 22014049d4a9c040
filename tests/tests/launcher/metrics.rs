//! `--metrics`: scrapes of a running program, parsed by Prometheus' own client library, against what PyTorch counts.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memtrace_tests::traced_program::{TracedProgram, packages, root};
use serde_json::Value;

/// A hang is reported after this time.
const HANG: Duration = Duration::from_secs(120);

/// The samples in both formats: name, labels, value and type.
fn scrape(url: &str, packages: &str) -> [Vec<Value>; 2] {
    let output = Command::new(root().join("scripts/sim"))
        .arg("python")
        .arg(root().join("tests/programs/launcher/scrape.py"))
        .arg(url)
        .env("PYTHONPATH", packages)
        .env("SIM_TORCH", "none")
        .output()
        .expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let both: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    [0, 1].map(|at| both[at].as_array().unwrap().clone())
}

/// The value of the sample with this name, and with this owner.
fn value(samples: &[Value], name: &str, owner: Option<&str>) -> Option<u64> {
    let is_it = |sample: &&Value| sample[0] == name && owner.is_none_or(|owner| sample[1]["owner"] == owner);
    samples.iter().find(is_it).map(|sample| sample[2].as_f64().unwrap() as u64)
}

#[test]
fn prometheus_reads_the_figures_of_a_running_program() {
    let packages = packages(&["prometheus_client==0.21.1"]);
    let folder = tempfile::tempdir().unwrap();
    let program = TracedProgram::python("launcher/served.py", &[]).option("--metrics").option("127.0.0.1:0");
    let mut command = program.option("--no-snapshot").prepare(Some(&folder.path().join("run")));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut stdin, stdout, stderr) =
        (child.stdin.take().unwrap(), child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (mut stdout, mut stderr) = (BufReader::new(stdout).lines(), BufReader::new(stderr).lines());
    let url = stderr.by_ref().find_map(|line| Some(line.unwrap().split_once("metrics at ")?.1.to_owned())).unwrap();
    // The launcher's report does not fill the pipe.
    let rest = std::thread::spawn(move || stderr.for_each(drop));
    let numbers = stdout.next().unwrap().unwrap();
    let [allocated, reserved] = numbers.split(' ').map(|n| n.parse().unwrap()).collect::<Vec<u64>>()[..] else {
        panic!("{numbers}")
    };
    // Events reach the figures shortly after they happened.
    let until = |is_there: &dyn Fn(&[Value]) -> bool| {
        let started = Instant::now();
        loop {
            let [plain, open] = scrape(&url, &packages);
            if is_there(&plain) && is_there(&open) {
                return [plain, open];
            }
            assert!(started.elapsed() < HANG, "{plain:?}");
        }
    };
    let both = until(&|samples| value(samples, "memtrace_allocated_bytes", None) == Some(allocated));
    for samples in &both {
        assert_eq!(value(samples, "memtrace_reserved_bytes", None), Some(reserved));
        assert_eq!(value(samples, "memtrace_device_memory_bytes", Some("PyTorch")), Some(reserved));
        assert_eq!(value(samples, "memtrace_out_of_memory_errors_total", None), Some(0));
        assert!(value(samples, "memtrace_allocations_total", None).unwrap() >= 7, "{samples:?}");
        assert!(value(samples, "memtrace_allocation_bytes_total", None).unwrap() >= 20_000_000, "{samples:?}");
        assert_eq!(value(samples, "memtrace_processes_without_figures", None), Some(0));
        let kinds: Vec<&Value> =
            samples.iter().filter(|s| s[0] == "memtrace_allocations_total").map(|s| &s[3]).collect();
        assert_eq!(kinds, ["counter"]);
        let labels = &samples.iter().find(|sample| sample[0] == "memtrace_allocated_bytes").unwrap()[1];
        assert!(labels["device"] == "0" && labels["pid"].as_str().unwrap().parse::<u32>().is_ok(), "{labels}");
    }
    stdin.write_all(b"\n").unwrap();
    assert_eq!(stdout.next().unwrap().unwrap(), "out of memory");
    until(&|samples| value(samples, "memtrace_out_of_memory_errors_total", None) == Some(1));
    stdin.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    rest.join().unwrap();
}

#[test]
fn an_address_in_use_is_an_error_before_the_command_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let output = TracedProgram::command(&["echo", "started"])
        .option("--metrics")
        .option(&address)
        .prepare(Some(&run))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), &*output.stdout), (Some(125), &b""[..]), "{stderr}");
    assert!(stderr.contains(&format!("error: cannot serve metrics on {address}: ")) && !run.exists(), "{stderr}");
}
