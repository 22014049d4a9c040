//! `--cycles` shows the objects of reference cycles that held tensors, on pages and as text. The program does not
//! notice it.

use memtrace_analysis::passes::Analysis;
use memtrace_analysis::report::IssueSummary;
use memtrace_analysis::rules::RuleId;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_tests::versions::Versions;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::{Action, Flags};

/// The HTML pages in the run folder, as (name, content).
fn pages(run: &Run) -> Vec<(String, String)> {
    let mut pages: Vec<_> = std::fs::read_dir(run.path())
        .expect("the run's folder")
        .map(|entry| entry.expect("an entry"))
        .map(|entry| (entry.file_name().into_string().expect("a name"), entry.path()))
        .filter(|(name, _)| name.ends_with(".html") && name != "report.html")
        .map(|(name, path)| (name, std::fs::read_to_string(path).expect("a page")))
        .collect();
    pages.sort();
    pages
}

/// The cycles in the trace, as (file, text), without consecutive repetitions.
fn recorded_cycles(run: &Run) -> Vec<(String, String)> {
    let mut cycles: Vec<_> =
        run.trace().definitions().cycles.iter().map(|c| (c.file.to_string(), c.text.to_string())).collect();
    cycles.dedup();
    cycles
}

#[track_caller]
fn cycle_issue(run: &Run) -> IssueSummary {
    let summary = summarize(&open_run(run.path()).expect("a run"), &mut |_| {}).expect("a summary");
    let mut issues = summary.processes.into_iter().flat_map(|p| p.issues);
    issues.find(|f| f.rule == RuleId::ReferenceCycle).expect("the issue")
}

/// The sizes in bytes of the blocks that the garbage collector freed.
fn collected(run: &Run) -> Vec<u64> {
    let trace = run.trace();
    let of_gc = |e: &memtrace_trace::event::Event| e.flags.contains(Flags::IN_GC) && e.action == Action::FreeRequested;
    events(&trace).into_iter().filter(of_gc).map(|e| e.size).collect()
}

/// The page has no script, and a browser fetches nothing for it.
#[track_caller]
fn assert_loads_nothing(page: &str) {
    assert!(page.contains("content=\"default-src 'none'; style-src 'unsafe-inline'\""), "{page}");
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for part in ["<script", "<link", "<img", "<iframe", "src=", "url(", "@import", "//", "onload"] {
        assert!(!page.contains(part), "{part}: {page}");
    }
}

#[test]
fn an_exception_that_its_frame_references() {
    let run = TracedProgram::python("issues/retry.py", &[]).option("--cycles").run();
    run.assert_ended_well();
    let cycles = recorded_cycles(&run);
    let [(file, text)] = &cycles[..] else { panic!("{cycles:#?}") };
    assert_eq!(file, "cycle-0.html");
    assert!(["frame attempt", "ValueError", "traceback"].iter().all(|word| text.contains(word)), "{text}");
    let (_, html) = &pages(&run)[0];
    for word in
        ["<b>ValueError</b>", "<b>traceback</b>", "<b>frame attempt</b>", "retry.py:", "local noise", "local failure"]
    {
        assert!(html.contains(word), "{word}: {html}");
    }
    assert_loads_nothing(html);
}

/// The program sees the same state as without memtrace, except our function in `gc.callbacks`.
#[track_caller]
fn check_unchanged(case: &str, with: impl Fn(TracedProgram) -> TracedProgram) -> Run {
    let traced = with(TracedProgram::python("cycles/kinds.py", &[case]));
    let (alone, plain, run) = (traced.run_alone(), traced.run(), traced.clone().option("--cycles").run());
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    plain.assert_ended_well();
    run.assert_ended_well();
    assert_eq!(text(&plain.output.stdout), text(&alone.stdout));
    let ours = text(&run.output.stdout);
    assert!(ours.contains("['memtrace_cycles', 'callback']"), "{ours}");
    assert_eq!(ours.replace("'memtrace_cycles', ", ""), text(&alone.stdout));
    assert!(pages(&plain).is_empty());
    run
}

/// Requires one cycle of each kind, whichever order they appear in, each with a page.
#[track_caller]
fn check_kinds(run: &Run) {
    let cycles = recorded_cycles(run);
    let has = |what: &str| cycles.iter().filter(|(_, text)| text.contains(what)).count();
    for kind in ["Slots -> Slots", "Finalized.itself -> Finalized", "Broken['itself'] -> Broken", "frame exception"] {
        assert_eq!(has(kind), 1, "{kind}: {cycles:#?}");
    }
    assert_eq!(has("function closure.<locals>.inner"), 1, "{cycles:#?}");
    assert!(has("Node.children -> list[0] -> dict['parent'] -> Node") >= 1, "{cycles:#?}");
    let pages = pages(run);
    assert_eq!(cycles.iter().filter(|(file, _)| !file.is_empty()).count(), pages.len(), "{cycles:#?}");
    assert_eq!((pages.len(), run.trace().counter(Counter::CyclesNotShown)), (cycles.len(), 0), "{cycles:#?}");
    pages.iter().for_each(|(_, page)| assert_loads_nothing(page));
    // The page of a dictionary whose methods raise exceptions shows its content.
    let (file, _) = cycles.iter().find(|(_, text)| text.contains("Broken")).expect("the cycle");
    let (_, page) = pages.iter().find(|(name, _)| name == file).expect("its page");
    assert!(page.contains("[&#39;itself&#39;]") && page.contains("[&#39;data&#39;]"), "{page}");
}

#[test]
fn every_kind_of_cycle() {
    check_kinds(&check_unchanged("cuda", |traced| traced));
}

/// The program's properties and `repr` are not called, so an object that they would store is freed.
#[test]
fn no_code_of_the_program_runs() {
    let run = TracedProgram::python("cycles/kinds.py", &["stored"]).option("--cycles").run();
    run.assert_ended_well();
    let out = String::from_utf8_lossy(&run.output.stdout).into_owned();
    assert!(out.contains("stored False True [] 0\nfreed 0\n"), "{out}");
    assert_eq!(recorded_cycles(&run).len(), 1, "{out}");
    let trace = run.trace();
    let notices: Vec<_> = trace.definitions().notices.iter().filter(|n| &*n.topic == "python.cycles").collect();
    assert!(!notices.iter().any(|n| n.text.contains("a later collection frees them")), "{notices:#?}");
}

/// Class names, attributes and keys that are markup, scripts and control sequences.
#[test]
fn hostile_names_are_text() {
    let run = TracedProgram::python("cycles/names.py", &[]).option("--cycles").run();
    run.assert_ended_well();
    let pages = pages(&run);
    assert!(!pages.is_empty(), "{:#?}", recorded_cycles(&run));
    for (_, page) in &pages {
        assert_loads_nothing(&page.replace("&lt;script src=&quot;//x&quot;&gt;", ""));
        assert!(page.contains("&lt;script src=&quot;//x&quot;&gt;alert(1)&lt;/script&gt;"), "{page}");
        assert!(!page.contains(|c: char| c != '\n' && c.is_control()) && !page.contains('\u{202e}'), "{page}");
    }
}

/// The pages need nothing of PyTorch but its tensors.
#[test]
fn a_pytorch_release_without_the_cycles_module() {
    // Make the module unavailable, as in such a release.
    let hidden = tempfile::tempdir().expect("a folder");
    let text = "import sys\nsys.modules['torch.utils.viz._cycles'] = None\n";
    std::fs::write(hidden.path().join("sitecustomize.py"), text).expect("a file");
    let run =
        TracedProgram::python("cycles/kinds.py", &["cuda"]).env("PYTHONPATH", hidden.path()).option("--cycles").run();
    run.assert_ended_well();
    check_kinds(&run);
}

#[test]
fn a_program_with_another_folder_and_umask() {
    let run =
        TracedProgram::python("cycles/kinds.py", &["cuda"]).env("MEMTRACE_TEST_UMASK", "0777").option("--cycles").run();
    run.assert_ended_well();
    check_kinds(&run);
}

mod exhaustive {
    use super::*;

    #[test]
    fn cycles_of_cpu_tensors() {
        check_kinds(&check_unchanged("cpu", |traced| traced));
    }

    memtrace_tests::for_each_version! { mod versions: on }

    #[test]
    fn a_release_with_the_memory_reporter_only() {
        on(Versions::REPORTER_ONLY);
    }

    fn on(versions: Versions) {
        if versions.python == "3.8" {
            let run = TracedProgram::python("cycles/kinds.py", &["cuda"]).on(versions).option("--cycles").run();
            run.assert_ended_well();
            let trace = run.trace();
            let mut notices = trace.definitions().notices.iter();
            let notice = notices.find(|n| &*n.topic == "python.cycles").expect("a notice");
            assert_eq!(notice.status, NoticeStatus::Off);
            assert!(notice.text.contains("this requires CPython 3.10 or later"), "{}", notice.text);
            return;
        }
        check_kinds(&check_unchanged("cuda", |traced| traced.on(versions)));
    }

    #[test]
    fn a_program_that_uses_gc_debug_saveall() {
        check_unchanged("saving", |traced| traced);
    }

    #[test]
    fn a_tree_with_references_to_parents() {
        let tree = TracedProgram::python("issues/tree.py", &[]);
        let (with, without) = (tree.clone().option("--cycles").run(), tree.run());
        with.assert_ended_well();
        without.assert_ended_well();
        assert!(pages(&without).is_empty() && recorded_cycles(&without).is_empty());
        let plain = cycle_issue(&without);
        assert!(plain.files.is_empty() && plain.fix.contains("memtrace --cycles"), "{plain:#?}");

        let pages = pages(&with);
        let [(name, html)] = &pages[..] else { panic!("one kind of cycle: {pages:#?}") };
        for part in [
            "<b>Node</b>",
            ">.children<",
            ">.parent<",
            ">[0]<",
            "<b>Tensor float32[1024, 1024]</b> <span class=\"dim\">4194304 bytes at 0x",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert_loads_nothing(html);
        let issue = cycle_issue(&with);
        assert_eq!(issue.files, std::slice::from_ref(name));
        let shown: Vec<_> = issue.evidence.iter().filter(|line| line.starts_with("objects of the cycle: ")).collect();
        // Either child may be the one shown.
        let shown: Vec<String> = shown.iter().map(|line| line.replace("[1]", "[0]").replace("[2]", "[0]")).collect();
        let expected = format!(
            "objects of the cycle: {name}: Node.children -> list[0] -> Node.parent -> Node; Node.value -> Tensor \
             float32[1024, 1024] and 3 more tensors"
        );
        assert_eq!(shown, [expected]);
        // The same number of collections frees the same memory, and the issue names the same line.
        assert_eq!(issue.headline, plain.headline);
        assert_eq!(issue.stack.map(|stack| stack.location), plain.stack.map(|stack| stack.location));
        assert_eq!(issue.evidence[0], plain.evidence[0]);
        assert_eq!(collected(&with), collected(&without));
        // The text report names the file.
        let page = std::fs::read_to_string(with.path().join("summary.txt")).expect("summary.txt");
        assert!(page.contains("cycle-0.html shows its objects"), "{page}");
        // The tensors in the cycle are those allocated at the reported line.
        let run = open_run(with.trace().path()).expect("a readable trace");
        let process = &run.processes()[0];
        let held = Analysis::of(process.recording(), process.trace_index(), &mut |_| {}).objects.cycles;
        assert_eq!(held.len(), 4);
        assert!(held.iter().all(|held| held.allocation.is_some()), "{held:#?}");
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(with.path().join(name)).expect("the page").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
