//! Small programs after public bug reports, each with the truth in its header: the cause at its line, the peak that the
//! change measured, and nothing to say about the repaired twin (`FIX=1`).

mod exhaustive {
    use std::fmt::Write as _;

    use memtrace_analysis::report::Summary;
    use memtrace_analysis::{open_run, summarize};
    use memtrace_tests::parallel::in_parallel;
    use memtrace_tests::traced_program::{TracedProgram, root};

    /// No announced peak may be further from the measured one, in percent of the measured one.
    const MAXIMUM_ERROR: f64 = 2.0;

    /// A program and its truth.
    #[derive(Clone, Copy)]
    struct Case {
        /// The path below tests/programs/cases.
        program: &'static str,
        env: &'static [(&'static str, &'static str)],
        /// The issues: rule and part of the place, in any order, and no others.
        issues: &'static [(&'static str, &'static str)],
        /// Other issues with the same cause, which depend on how threads alternate.
        may_have: &'static [(&'static str, &'static str)],
        /// Suggestions that the report must have, with the peak that their change measured, in MiB.
        suggestions: &'static [(&'static str, f64)],
        /// Suggestions that the report must not have.
        not_suggested: &'static [&'static str],
        /// Parts that the text of the report must have, and parts that it must not have.
        texts: &'static [&'static str],
        not_texts: &'static [&'static str],
        has_twin: bool,
    }

    const NOTHING: Case = Case {
        program: "",
        env: &[],
        issues: &[],
        may_have: &[],
        suggestions: &[],
        not_suggested: &[],
        texts: &[],
        not_texts: &[],
        has_twin: true,
    };

    /// A program without a twin.
    const SINGLE: Case = Case { has_twin: false, ..NOTHING };

    const CASES: &[Case] = &[
        Case { program: "autocast_sweep.py", suggestions: &[("no-autocast-cache", 436.0)], ..NOTHING },
        Case { program: "buffers32.py", not_texts: &["cuBLAS"], ..SINGLE },
        Case {
            program: "crowded.py",
            env: &[("SIMCUDA_MEMORY", "2G")],
            not_suggested: &["autocast", "smaller-batches"],
            texts: &["crowded.py:29 overlaps, 25 times the most of any other step"],
            ..NOTHING
        },
        Case {
            program: "ctx_output.py",
            issues: &[("leak", "ctx_output.py:15"), ("fragmentation", "ctx_output.py:15")],
            ..NOTHING
        },
        Case {
            program: "data_parallel.py",
            env: &[("SIMCUDA_DEVICES", "2")],
            suggestions: &[("loss-in-replicas", 425.3), ("smaller-batches", 540.0)],
            ..NOTHING
        },
        Case { program: "eval_logits.py", suggestions: &[("results-to-cpu", 251.8)], ..NOTHING },
        Case {
            program: "foreign_pool.py",
            env: &[("SIMCUDA_MEMORY", "6G")],
            texts: &["4.50 GiB", "foreign_pool.py:25 reserve"],
            has_twin: false,
            ..NOTHING
        },
        Case { program: "grad_norm_probe.py", issues: &[("leak", "grad_norm_probe.py:20")], ..NOTHING },
        Case { program: "growing_adapters.py", issues: &[("leak", "growing_adapters.py:29")], ..NOTHING },
        Case {
            program: "kept_scores.py",
            issues: &[("leak", "kept_scores.py:40"), ("leak", "kept_scores.py:24")],
            ..NOTHING
        },
        Case {
            program: "local_list.py",
            env: &[("HOLD", "local")],
            issues: &[("leak", "local_list.py:20")],
            suggestions: &[("results-to-cpu", 45.0)],
            ..SINGLE
        },
        Case {
            program: "local_list.py",
            env: &[("HOLD", "global")],
            issues: &[("leak", "local_list.py:20")],
            suggestions: &[("results-to-cpu", 45.0)],
            ..SINGLE
        },
        Case {
            program: "log_probs.py",
            suggestions: &[("smaller-batches", 1218.8), ("offload-activations", 1803.2), ("checkpoint-layers", 1825.4)],
            ..NOTHING
        },
        Case { program: "lru_method.py", issues: &[("leak", "lru_method.py:37")], ..NOTHING },
        Case {
            program: "mask_buffers.py",
            suggestions: &[
                ("share-buffers", 501.0),
                ("smaller-batches", 1185.7),
                ("offload-activations", 1110.6),
                ("checkpoint-layers", 1108.5),
            ],
            ..NOTHING
        },
        Case {
            program: "onehot_dice.py",
            suggestions: &[("smaller-batches", 333.0), ("offload-activations", 593.8)],
            texts: &["onehot_dice.py"],
            ..NOTHING
        },
        Case {
            program: "resume_globals.py",
            issues: &[("checkpoint-kept", "resume_globals.py:39")],
            not_texts: &["its batch is larger"],
            ..NOTHING
        },
        Case { program: "sliced_logits.py", suggestions: &[("chunked-cross-entropy", 432.3)], ..NOTHING },
        Case { program: "stranded_streams.py", issues: &[("stream-caches", "stranded_streams.py:21")], ..NOTHING },
        Case {
            program: "teacher_detach.py",
            issues: &[("eval-without-no-grad", "teacher_detach.py:31")],
            suggestions: &[("no-grad", 298.7)],
            ..NOTHING
        },
        Case {
            program: "tts_thread.py",
            issues: &[("graph-kept", "tts_thread.py:24")],
            may_have: &[("eval-without-no-grad", "tts_thread.py:32")],
            ..NOTHING
        },
        Case { program: "val_outputs.py", issues: &[("leak", "val_outputs.py:24")], ..NOTHING },
        Case {
            program: "advice/min_eval_inputs.py",
            texts: &["156 MiB 55 % kept tensors in 2 blocks"],
            not_texts: &["larger inputs"],
            ..SINGLE
        },
        Case {
            program: "advice/min_frozen_head.py",
            issues: &[("gradients-not-cleared", "min_frozen_head.py:6")],
            texts: &["requires_grad_(False)"],
            not_suggested: &["set-to-none"],
            ..SINGLE
        },
        Case {
            program: "advice/min_gpipe.py",
            texts: &["each of the 4 micro-batches"],
            not_suggested: &["smaller-batches"],
            ..SINGLE
        },
        Case { program: "advice/min_helper.py", issues: &[("eval-without-no-grad", "min_helper.py:9")], ..SINGLE },
        Case {
            program: "advice/min_history_end.py",
            issues: &[("leak", "min_history_end.py:9")],
            texts: &["kept tensors"],
            ..SINGLE
        },
        Case {
            program: "advice/min_requests.py",
            issues: &[("leak", "min_requests.py:7")],
            texts: &["256 KiB"],
            ..SINGLE
        },
        Case {
            program: "advice/min_resnet_oom.py",
            env: &[("SIMCUDA_MEMORY", "900M")],
            texts: &["its batch is larger", "TransformerEncoderLayer)"],
            ..SINGLE
        },
        Case {
            program: "advice/min_two_roots.py",
            texts: &["(Embedding)", "(Linear)"],
            not_texts: &["(2 of Sequential)"],
            ..SINGLE
        },
        Case { program: "advice/min_window.py", texts: &["84.0 MiB 34 % in 21 blocks"], ..SINGLE },
        Case { program: "advice/min_ws_cleared.py", texts: &["cuBLAS workspaces"], ..SINGLE },
        Case {
            program: "advice/min_ws_solve.py",
            not_suggested: &["smaller-batches"],
            not_texts: &["zero_grad"],
            ..SINGLE
        },
    ];

    fn record(case: &Case, is_fixed: bool) -> (Summary, String) {
        let path = root().join("tests/programs/cases").join(case.program);
        let mut traced = TracedProgram::python(path.to_str().expect("UTF-8"), &[]).option("--no-snapshot");
        for (name, value) in case.env {
            traced = traced.env(name, value);
        }
        let run = traced.env("FIX", if is_fixed { "1" } else { "0" }).run();
        let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("a report");
        (summarize(&open_run(run.path()).expect("a run"), &mut |_| {}).expect("a summary"), text)
    }

    /// The rule and the place of each issue of a run.
    fn issues(summary: &Summary) -> Vec<(String, String)> {
        let all = summary.processes.iter().flat_map(|process| &process.issues);
        let place = |issue: &memtrace_analysis::report::IssueSummary| {
            issue.stack.as_ref().map_or(String::new(), |stack| stack.location.clone())
        };
        all.map(|issue| (issue.rule.to_string(), place(issue))).collect()
    }

    /// Everything wrong about a case, a line each.
    fn wrong(case: &Case) -> String {
        let mut wrong = String::new();
        let mut found = |text: String| writeln!(wrong, "{} {:?}: {text}", case.program, case.env).expect("a string");
        let (summary, text) = record(case, false);
        let issues_found = issues(&summary);
        let is = |(rule, place): &(&str, &str), issue: &(String, String)| issue.0 == *rule && issue.1.contains(place);
        for expected in case.issues.iter().filter(|one| !issues_found.iter().any(|issue| is(one, issue))) {
            found(format!("lacks {expected:?}, has {issues_found:?}"));
        }
        let known = || case.issues.iter().chain(case.may_have);
        for issue in issues_found.iter().filter(|issue| !known().any(|one| is(one, issue))) {
            found(format!("has {issue:?} too"));
        }
        let devices = || summary.processes.iter().flat_map(|process| &process.devices);
        let suggested = |rule: &str| {
            let mut all = devices().flat_map(|device| &device.suggestions);
            all.find(|one| one.rule.to_string() == rule)
        };
        for (rule, measured) in case.suggestions {
            let announced = suggested(rule).map(|one| one.peak_after_bytes as f64 / f64::from(1 << 20));
            let is_right = announced.is_some_and(|peak| (peak - measured).abs() * 100.0 <= measured * MAXIMUM_ERROR);
            if !is_right {
                found(format!("{rule} announces {announced:?} MiB, measured {measured}"));
            }
        }
        for rule in case.not_suggested.iter().filter(|rule| suggested(rule).is_some()) {
            found(format!("suggests {rule}"));
        }
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in case.texts.iter().filter(|one| !words.contains(**one)) {
            found(format!("lacks {expected:?}:\n{text}"));
        }
        for other in case.not_texts.iter().filter(|one| words.contains(**one)) {
            found(format!("has {other:?}:\n{text}"));
        }
        if case.has_twin {
            let of_twin = issues(&record(case, true).0);
            if !of_twin.is_empty() {
                found(format!("the repaired twin has {of_twin:?}"));
            }
        }
        wrong
    }

    #[test]
    fn each_case_gets_its_truth_and_its_repaired_twin_no_issue() {
        let all = in_parallel(CASES, 2, wrong).concat();
        assert!(all.is_empty(), "{all}");
    }
}
