//! `memtrace man` and `memtrace completions`: manual pages and shell completions from the command line's definition.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::cli::{self, Cli};
use crate::message;
use crate::output::Printed;
use crate::output_file::OutputFile;

/// Writes the manual pages, or prints one page without an output folder.
pub(crate) fn man(options: &cli::Man) -> anyhow::Result<()> {
    let mut command = Cli::command();
    command.build();
    let Some(folder) = &options.output else {
        return super::write_output(Printed::File(&page(command)?), None);
    };
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let commands: Vec<clap::Command> =
        command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()).cloned().collect();
    write(folder, "memtrace", command)?;
    for command in commands {
        let name = format!("memtrace-{}", command.get_name());
        // `man` expects a name that is one word.
        write(folder, &name, command.display_name(name.clone()))?;
    }
    Ok(())
}

fn page(command: clap::Command) -> anyhow::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command).section("1").manual("memtrace").render(&mut page).context("cannot render the manual page")?;
    let page = String::from_utf8(page).context("cannot render the manual page")?;
    // `\:` lets troff break a line between alternatives. Together they can be longer than a line, and one of them can
    // be too long for an adjusted line before it.
    Ok(page.replace(r"\fR|\fB", r"\fR|\:\fB").replace(".SH SYNOPSIS\n", ".SH SYNOPSIS\n.ad l\n").into_bytes())
}

fn write(folder: &Path, name: &str, command: clap::Command) -> anyhow::Result<()> {
    let path = folder.join(format!("{name}.1"));
    OutputFile::write(&path, &page(command)?)?;
    message::status(&format!("wrote {}", path.display()));
    Ok(())
}

/// Prints the completion script of a shell.
pub(crate) fn completions(options: &cli::Completions) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Cli::command(), "memtrace", &mut script);
    super::write_output(Printed::File(&script), None)
}
