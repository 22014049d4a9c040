//! `memtrace kernel`: installs and removes Jupyter kernels that memtrace records.
//!
//! Jupyter's own package knows where kernels belong. The Python of the kernel has it, so that Python runs `kernel.py`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use serde::Deserialize;
use serde_json::json;

use crate::cli::{Cli, Command, Kernel, KernelCommand, KernelLocation};
use crate::message::{self, WithHelp};

/// The program that the Python of the kernel runs.
const SCRIPT: &str = include_str!("kernel.py");
/// The help if the Python cannot run it.
const NAME_PYTHON: &str = "name the Python of your notebooks: --python PATH";

/// The answer of [`SCRIPT`].
#[derive(Deserialize, Default)]
#[serde(default)]
struct Answer {
    path: PathBuf,
    display_name: String,
    warnings: Vec<String>,
    error: Option<String>,
    help: String,
}

/// Installs or removes a kernel.
pub(crate) fn kernel(kernel: &Kernel) -> anyhow::Result<()> {
    match &kernel.command {
        KernelCommand::Install(install) => {
            let options = run_options(&install.options)?;
            let memtrace = std::env::current_exe().context("cannot find the path of memtrace")?;
            let mut request = request("install", &install.location, &install.name);
            // Without a place, the kernel is for this user.
            if request["location"].is_null() && request["prefix"].is_null() {
                request["location"] = "user".into();
            }
            request["display_name"] = json!(install.display_name);
            request["memtrace"] = json!(memtrace.to_str().context("the path of memtrace is not UTF-8")?);
            request["options"] = json!(options);
            request["version"] = json!(env!("CARGO_PKG_VERSION"));
            let answer = run(install.python.as_deref(), &request)?;
            message::status(&format!("installed the kernel {} in {}", install.name, answer.path.display()));
            message::help(&format!("choose the kernel \"{}\" in the notebook", answer.display_name));
        }
        KernelCommand::Remove(remove) => {
            let answer = run(remove.python.as_deref(), &request("remove", &remove.location, &remove.name))?;
            message::status(&format!("removed {}", answer.path.display()));
        }
    }
    Ok(())
}

fn request(action: &str, location: &KernelLocation, name: &str) -> serde_json::Value {
    let place = if location.user {
        Some("user")
    } else if location.sys_prefix {
        Some("sys-prefix")
    } else {
        None
    };
    json!({ "action": action, "name": name, "location": place, "prefix": location.prefix })
}

/// The options of `memtrace run`, after a check that it accepts them.
fn run_options(options: &[String]) -> anyhow::Result<&[String]> {
    let line = ["memtrace", "run", "--quiet", "--reports-in-background"]
        .into_iter()
        .chain(options.iter().map(String::as_str))
        .chain(["--", "python"]);
    let parsed = Cli::try_parse_from(line).map_err(|error| {
        let text = error.to_string();
        let text = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        WithHelp::new(format!("`memtrace run` refuses the options after --: {text}"), "memtrace run --help")
    })?;
    let Command::Run(run) = parsed.command else { bail!("the options after -- are not those of `memtrace run`") };
    ensure!(
        run.command == ["python"],
        WithHelp::new("only options may follow --", "the kernel's own command is added: use --python to choose it")
    );
    ensure!(
        run.output.is_none(),
        WithHelp::new(
            "-o names one run folder, and each start of a kernel needs a new one",
            "use --runs DIR to have the run folders in DIR"
        )
    );
    Ok(options)
}

/// Runs the script with the Python of the kernel.
fn run(python: Option<&Path>, request: &serde_json::Value) -> anyhow::Result<Answer> {
    let execute = |python: &Path| Process::new(python).arg("-c").arg(SCRIPT).arg(request.to_string()).output();
    let (python, done) = match python {
        Some(python) => (python, execute(python)),
        None => match execute(Path::new("python")) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => (Path::new("python3"), execute(Path::new("python3"))),
            done => (Path::new("python"), done),
        },
    };
    let shown = python.display();
    let Output { status, stdout, stderr } =
        done.with_context(|| WithHelp::new(format!("cannot execute {shown}"), NAME_PYTHON))?;
    let Some(answer) = serde_json::from_slice::<Answer>(&stdout).ok().filter(|_| status.success()) else {
        let stderr = String::from_utf8_lossy(&stderr);
        let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed nothing").to_owned();
        bail!(WithHelp::new(format!("{shown} cannot install a kernel: {last}"), NAME_PYTHON));
    };
    if let Some(error) = answer.error {
        bail!(WithHelp::new(error, answer.help));
    }
    answer.warnings.iter().for_each(|warning| message::warning(warning));
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::help_of;

    fn checked(options: &str) -> anyhow::Result<usize> {
        let options: Vec<String> = options.split_whitespace().map(str::to_owned).collect();
        run_options(&options).map(<[String]>::len)
    }

    #[test]
    fn options_are_those_of_run() {
        assert_eq!(checked("").unwrap(), 0);
        assert_eq!(checked("--stacks both --runs /data --holders").unwrap(), 5);
        let error = checked("--stacks wrong").unwrap_err();
        assert!(error.to_string().contains("invalid value 'wrong'"), "{error:#}");
        assert!(checked("--no-such-option").unwrap_err().to_string().contains("--no-such-option"));
        assert!(help_of(&checked("-o run").unwrap_err()).is_some_and(|help| help.contains("--runs")));
        assert!(checked("python train.py").unwrap_err().to_string().contains("only options"));
    }
}
