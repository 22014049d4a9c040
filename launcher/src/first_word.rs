//! The first word of a command line that names no command of memtrace: a program to record, or a mistyped command.
//!
//! `memtrace python train.py` records python. `memtrace reprot RUN` and `memtrace view RUN` must not start a program
//! that happens to have this name, so such a word is recorded only after `--` or `run`.

/// The commands that other tools have, with those of memtrace that do the same.
const SYNONYMS: [(&[&str], &[&str]); 12] = [
    (&["view", "show", "display", "browse"], &["report", "open"]),
    (&["stats", "stat", "statistics", "summary", "summarize", "analyze", "inspect", "info"], &["report"]),
    (&["top", "monitor", "watch", "status"], &["live"]),
    (&["compare"], &["diff"]),
    (&["convert"], &["export"]),
    (&["dump"], &["snapshot", "export"]),
    (&["profile", "record", "trace", "exec"], &["run"]),
    (&["simulate", "sim"], &["dry-run"]),
    (&["verify", "validate", "assert"], &["check"]),
    (&["anonymize"], &["redact"]),
    (&["pause"], &["suspend"]),
    (&["version"], &["--version"]),
];

/// The length from which a word may have two typing errors.
const LONG: usize = 7;

/// The commands, out of `commands`, that a word is a synonym or a misspelling of. Empty for the name of a program.
///
/// `srun` and `mpirun` are programs that start others: a misspelling begins with the letter of the command.
pub(crate) fn commands_like<'a>(word: &str, commands: impl Iterator<Item = &'a str>) -> Vec<String> {
    // The word of a message. A name with other characters is a path, or nobody's typing error.
    if !word.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
        return Vec::new();
    }
    let word = word.to_ascii_lowercase();
    if let Some((_, same)) = SYNONYMS.iter().find(|(synonyms, _)| synonyms.contains(&&*word)) {
        return same.iter().map(|command| (*command).to_owned()).collect();
    }
    let errors = |command: &&str| {
        let allowed = if command.len() < LONG { 1 } else { 2 };
        let begins_alike = command.bytes().next() == word.bytes().next();
        Some(strsim::osa_distance(command, &word)).filter(|errors| begins_alike && *errors <= allowed)
    };
    let found: Vec<(usize, &str)> = commands.filter_map(|command| Some((errors(&command)?, command))).collect();
    let fewest = found.iter().map(|(errors, _)| *errors).min();
    found.iter().filter(|(errors, _)| Some(*errors) == fewest).map(|(_, command)| (*command).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMANDS: [&str; 22] = [
        "run",
        "dry-run",
        "report",
        "open",
        "export",
        "lines",
        "diff",
        "check",
        "redact",
        "suspend",
        "resume",
        "attach",
        "live",
        "snapshot",
        "doctor",
        "mcp",
        "kernel",
        "explain",
        "docs",
        "man",
        "completions",
        "help",
    ];

    fn like(word: &str) -> String {
        commands_like(word, COMMANDS.into_iter()).join(" ")
    }

    #[test]
    fn synonyms_and_misspellings_are_commands() {
        let cases = [
            ("reprot", "report"),
            ("Report", "report"),
            ("reports", "report"),
            ("stats", "report"),
            ("summary", "report"),
            ("view", "report open"),
            ("SHOW", "report open"),
            ("opne", "open"),
            ("top", "live"),
            ("lvie", "live"),
            ("compare", "diff"),
            ("dif", "diff"),
            ("snaphsot", "snapshot"),
            ("snapsht", "snapshot"),
            ("dryrun", "dry-run"),
            ("dry_run", "dry-run"),
            ("rnu", "run"),
            ("version", "--version"),
        ];
        for (word, commands) in cases {
            assert_eq!(like(word), commands, "{word}");
        }
    }

    #[test]
    fn programs_are_no_commands() {
        let programs = "python python3 python3.12 torchrun accelerate deepspeed srun mpirun mpiexec jsrun env \
                        nice time timeout uv uvx rye poetry pixi pdm conda ray bash sh zsh make numactl taskset \
                        docker podman composer jupyter nsys ncu perf gdb vllm sglang trtllm-serve pytest tox \
                        hatch julia cargo node ./view ./report.py view.py report.sh ./reprot a/reprot train ls \
                        true echo cat \x1breport";
        for program in programs.split(' ').chain(["", "re\nport", "snap\x1bshot", "r\u{435}port"]) {
            assert_eq!(like(program), "", "{program}");
        }
    }
}
