//! Matches the lines of two recordings: by file, function and line. Files match by the end of their path, because
//! folders differ between machines.
//!
//! An edit can move lines. Then the lines of a function are aligned in order. The criterion is their text if both
//! versions are available, else their callees and their distance from the start of the function.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{FrameId, StackId};

use memtrace_output::SourceFiles;

/// The maximum number of lines per function to align. In longer functions only equal line numbers match.
const MAX_LINES: usize = 400;

/// A line that occurs in one recording or in both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Line(u32);

/// One of the two recordings.
pub(crate) struct Version<'a> {
    pub(crate) definitions: &'a Definitions,
    /// The folder in which the program ran.
    pub(crate) directory: Option<&'a str>,
    pub(crate) sources: SourceFiles,
    /// The stacks whose lines are to be matched.
    pub(crate) stacks: BTreeSet<StackId>,
}

/// The matched lines of two recordings.
#[derive(Debug, Default)]
pub(crate) struct MatchedLines {
    of: [HashMap<FrameId, Line>; 2],
    frames: Vec<[FrameId; 2]>,
    /// The number of lines with another number in the second recording.
    pub(crate) moved: usize,
    /// The number of moved lines that were matched by the text of both sources.
    pub(crate) moved_by_text: usize,
}

/// The frames of one line of a function, in one recording.
#[derive(Debug, Default)]
struct LineFrames {
    frames: Vec<FrameId>,
    /// Hashes of the names of the functions that the line calls.
    calls: BTreeSet<u64>,
}

#[derive(Debug, Default)]
struct Function {
    first_line: u32,
    filename: Box<str>,
    lines: BTreeMap<u32, LineFrames>,
}

/// Functions by file and name, then by first line.
type Functions = BTreeMap<(String, Box<str>), BTreeMap<u32, Function>>;

impl MatchedLines {
    /// Matches the lines of two recordings.
    pub(crate) fn of(a: &mut Version<'_>, b: &mut Version<'_>) -> MatchedLines {
        // PyTorch's snapshots contain neither qualified names nor first lines of functions.
        let without_first_lines = [&*a, &*b].iter().any(|version| version.lacks_first_lines());
        let (mut of_a, of_b) = (a.functions(without_first_lines), b.functions(without_first_lines));
        rename(&mut of_a, &of_b);
        let mut matched = MatchedLines::default();
        let none = BTreeMap::new();
        let keys: BTreeSet<_> = of_a.keys().chain(of_b.keys()).cloned().collect();
        for key in keys {
            let ours = of_a.get(&key).unwrap_or(&none).values().map(Some);
            let theirs = of_b.get(&key).unwrap_or(&none).values().map(Some);
            let count = ours.len().max(theirs.len());
            let missing = std::iter::repeat(None);
            for (ours, theirs) in ours.chain(missing.clone()).zip(theirs.chain(missing)).take(count) {
                matched.match_function(ours, theirs, a, b);
            }
        }
        matched
    }

    /// The line of a frame of the first (0) or second (1) recording.
    pub(crate) fn line(&self, side: usize, frame: FrameId) -> Option<Line> {
        self.of[side].get(&frame).copied()
    }

    /// A frame of a line in each recording; `NONE` where the line is missing.
    pub(crate) fn frames(&self, line: Line) -> [FrameId; 2] {
        self.frames.get(line.0 as usize).copied().unwrap_or_default()
    }

    fn add(&mut self, ours: Option<&LineFrames>, theirs: Option<&LineFrames>) {
        let line = Line(self.frames.len() as u32);
        let first = |line_frames: Option<&LineFrames>| {
            line_frames.and_then(|line_frames| line_frames.frames.first().copied()).unwrap_or_default()
        };
        self.frames.push([first(ours), first(theirs)]);
        for (side, line_frames) in [ours, theirs].into_iter().enumerate() {
            self.of[side].extend(
                line_frames.into_iter().flat_map(|line_frames| &line_frames.frames).map(|frame| (*frame, line)),
            );
        }
    }

    fn match_function(
        &mut self,
        ours: Option<&Function>,
        theirs: Option<&Function>,
        a: &mut Version<'_>,
        b: &mut Version<'_>,
    ) {
        let (Some(ours), Some(theirs)) = (ours, theirs) else {
            ours.into_iter().flat_map(|f| f.lines.values()).for_each(|line_frames| self.add(Some(line_frames), None));
            theirs.into_iter().flat_map(|f| f.lines.values()).for_each(|line_frames| self.add(None, Some(line_frames)));
            return;
        };
        let mut pairs: Vec<(Option<u32>, Option<u32>)> = Vec::new();
        let whole = ours.lines.keys().eq(theirs.lines.keys()) && ours.first_line == theirs.first_line;
        let long = ours.lines.len().max(theirs.lines.len()) > MAX_LINES;
        // Equal line numbers are enough to match, unless both texts are available and differ.
        let texts = |version: &mut Version<'_>, function: &Function| -> Vec<Option<String>> {
            let text = |line: &u32| version.sources.line(&function.filename, *line).map(str::to_owned);
            function.lines.keys().map(text).collect()
        };
        let (text_a, text_b) = (texts(a, ours), texts(b, theirs));
        if long || whole && text_a == text_b {
            let lines: BTreeSet<u32> = ours.lines.keys().chain(theirs.lines.keys()).copied().collect();
            let has = |function: &Function, line| function.lines.contains_key(&line).then_some(line);
            pairs.extend(lines.into_iter().map(|line| (has(ours, line), has(theirs, line))));
        } else {
            pairs = aligned(ours, theirs, &text_a, &text_b);
        }
        for (x, y) in pairs {
            if let (Some(x), Some(y)) = (x, y)
                && x != y
            {
                self.moved += 1;
                let text = |function: &Function, texts: &[Option<String>], line: u32| {
                    texts.get(function.lines.range(..line).count()).cloned().flatten()
                };
                let (text_a, text_b) = (text(ours, &text_a, x), text(theirs, &text_b, y));
                self.moved_by_text += usize::from(text_a.is_some() && text_a == text_b);
            }
            self.add(x.and_then(|x| ours.lines.get(&x)), y.and_then(|y| theirs.lines.get(&y)));
        }
    }
}

/// The score for matching two lines; `None` if they cannot be the same line.
fn match_score(
    ours: (&Function, u32, &LineFrames, &Option<String>),
    theirs: (&Function, u32, &LineFrames, &Option<String>),
) -> Option<i64> {
    let into = |function: &Function, line: u32| i64::from(line) - i64::from(function.first_line);
    let away = (into(ours.0, ours.1) - into(theirs.0, theirs.1)).abs();
    let same_text = ours.3.is_some() && ours.3 == theirs.3;
    let other_text = ours.3.is_some() && theirs.3.is_some() && !same_text;
    let same_calls = ours.2.calls == theirs.2.calls;
    let score = match (same_text, other_text) {
        (true, _) => 100,
        // An edited line at the same place still calls the same functions.
        (_, true) if same_calls && away == 0 => 40,
        (_, true) => return None,
        _ if same_calls => 40,
        _ if away == 0 && !ours.2.calls.is_disjoint(&theirs.2.calls) => 20,
        _ => return None,
    };
    Some(score + if away == 0 { 20 } else { 0 } - away.min(15))
}

/// Aligns the lines of a function in order, with the highest total score.
fn aligned(
    ours: &Function,
    theirs: &Function,
    text_a: &[Option<String>],
    text_b: &[Option<String>],
) -> Vec<(Option<u32>, Option<u32>)> {
    let a: Vec<(u32, &LineFrames)> = ours.lines.iter().map(|(line, line_frames)| (*line, line_frames)).collect();
    let b: Vec<(u32, &LineFrames)> = theirs.lines.iter().map(|(line, line_frames)| (*line, line_frames)).collect();
    let score = |i: usize, j: usize| {
        let text = |texts: &'_ [Option<String>], at: usize| texts.get(at).cloned().flatten();
        match_score((ours, a[i].0, a[i].1, &text(text_a, i)), (theirs, b[j].0, b[j].1, &text(text_b, j)))
    };
    let width = b.len() + 1;
    let mut best = vec![0i64; (a.len() + 1) * width];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            let skip = best[(i + 1) * width + j].max(best[i * width + j + 1]);
            let both = score(i, j).map_or(i64::MIN, |score| score + best[(i + 1) * width + j + 1]);
            best[i * width + j] = skip.max(both);
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut pairs = Vec::new();
    while i < a.len() || j < b.len() {
        let here = best[i * width + j];
        let both = i < a.len() && j < b.len();
        if both && score(i, j).is_some_and(|score| score + best[(i + 1) * width + j + 1] == here) {
            pairs.push((Some(a[i].0), Some(b[j].0)));
            (i, j) = (i + 1, j + 1);
        } else if i < a.len() && (j == b.len() || best[(i + 1) * width + j] == here) {
            pairs.push((Some(a[i].0), None));
            i += 1;
        } else {
            pairs.push((None, Some(b[j].0)));
            j += 1;
        }
    }
    pairs
}

impl Version<'_> {
    fn lacks_first_lines(&self) -> bool {
        let mut python = self.definitions.frames.iter().filter(|frame| !frame.native && frame.line > 0).peekable();
        python.peek().is_some() && python.all(|frame| frame.first_line == 0)
    }

    fn functions(&self, without_first_lines: bool) -> Functions {
        let mut functions = Functions::new();
        for stack in &self.stacks {
            // The name of the next inner frame.
            let mut inner: Option<&str> = None;
            for (_, id) in self.definitions.walk_ids(*stack) {
                let Some(frame) = self.definitions.frame(id) else { continue };
                let first_line = if without_first_lines { 0 } else { frame.first_line };
                let name = if without_first_lines { &frame.name } else { &frame.qualname };
                let key = (self.file(frame), name.clone());
                let function = functions.entry(key).or_default().entry(first_line).or_default();
                function.first_line = first_line;
                if function.filename.is_empty() {
                    function.filename = frame.filename.clone();
                }
                let line_frames = function.lines.entry(frame.line).or_default();
                if !line_frames.frames.contains(&id) {
                    line_frames.frames.push(id);
                }
                let mut hasher = DefaultHasher::new();
                inner.hash(&mut hasher);
                line_frames.calls.insert(hasher.finish());
                inner = Some(&frame.name);
            }
        }
        functions
    }

    /// The path without the parts that differ between machines. It starts after the folder of installed packages, or
    /// after the program's folder.
    fn file(&self, frame: &Frame) -> String {
        let path = &*frame.filename;
        for folder in ["/site-packages/", "/dist-packages/"] {
            if let Some((_, rest)) = path.rsplit_once(folder) {
                return rest.to_owned();
            }
        }
        for folder in ["/lib/python3.", "/lib64/python3."] {
            if let Some((_, rest)) = path.rsplit_once(folder)
                && let Some((_, rest)) = rest.split_once('/')
            {
                return rest.to_owned();
            }
        }
        let own = self.directory.map(|d| d.trim_end_matches('/')).and_then(|d| path.strip_prefix(d)?.strip_prefix('/'));
        own.unwrap_or(path).to_owned()
    }
}

/// Renames files of the first recording that the second lacks, to the second's unmatched file with the most common
/// trailing components.
fn rename(of_a: &mut Functions, of_b: &Functions) {
    let files = |functions: &Functions| functions.keys().map(|(file, _)| file.clone()).collect::<BTreeSet<String>>();
    let (files_a, files_b) = (files(of_a), files(of_b));
    let alike = |a: &str, b: &str| a.rsplit('/').zip(b.rsplit('/')).take_while(|(a, b)| a == b).count();
    let mut candidates: Vec<(usize, &String, &String)> = Vec::new();
    for a in files_a.difference(&files_b) {
        let near = files_b.difference(&files_a).map(|b| (alike(a, b), a, b)).filter(|(alike, ..)| *alike > 0);
        candidates.extend(near);
    }
    candidates.sort_by(|x, y| y.0.cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
    let mut to: BTreeMap<String, String> = BTreeMap::new();
    for (_, a, b) in candidates {
        if !to.contains_key(a) && !to.values().any(|taken| taken == b) {
            to.insert(a.clone(), b.clone());
        }
    }
    if !to.is_empty() {
        let functions = std::mem::take(of_a).into_iter();
        let renamed = functions.map(|((file, name), f)| ((to.get(&file).cloned().unwrap_or(file), name), f));
        of_a.extend(renamed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::file::StackNode;

    /// The definitions of one function that begins at line `first` of `file`, with `(line, callee)` pairs.
    fn definitions(file: &str, first: u32, lines: &[(u32, &str)]) -> Definitions {
        let mut definitions = Definitions {
            frames: vec![Frame::default()],
            stacks: vec![StackNode::default()],
            ..Definitions::default()
        };
        let mut add = |parent: u32, name: &str, filename: &str, line: u32, first_line: u32| {
            let frame = FrameId(definitions.frames.len() as u32);
            let (name, filename) = (name.into(), filename.into());
            definitions.frames.push(Frame { qualname: name, filename, line, first_line, ..Frame::default() });
            let last = definitions.frames.last_mut().expect("just added");
            last.name = last.qualname.clone();
            definitions.stacks.push(StackNode { parent: StackId(parent), frame });
            definitions.stacks.len() as u32 - 1
        };
        for (line, callee) in lines {
            let caller = add(0, "forward", file, *line, first);
            add(caller, callee, "/x/site-packages/torch/nn.py", 7, 1);
        }
        definitions
    }

    fn pairs(a: &Definitions, b: &Definitions) -> Vec<(u32, u32)> {
        let version = |definitions| Version {
            definitions,
            directory: None,
            sources: SourceFiles::none(),
            // The stacks that end in the callee. `forward` itself allocates nothing.
            stacks: (1..=32).map(|callee| StackId(2 * callee)).collect(),
        };
        let matched = MatchedLines::of(&mut version(a), &mut version(b));
        let line = |definitions: &Definitions, id: FrameId| definitions.frame(id).map_or(0, |frame| frame.line);
        let of_forward = |[x, y]: &&[FrameId; 2]| {
            [(a, *x), (b, *y)].iter().any(|(d, id)| d.frame(*id).is_some_and(|frame| &*frame.name == "forward"))
        };
        matched.frames.iter().filter(of_forward).map(|[x, y]| (line(a, *x), line(b, *y))).collect()
    }

    #[test]
    fn lines_that_an_edit_moved_are_found() {
        let before = definitions("/home/me/model.py", 10, &[(11, "linear"), (12, "relu"), (14, "norm")]);
        // On another machine, after an edit: two more lines before the function and one more allocating line inside it.
        let after = definitions("/srv/job/model.py", 12, &[(13, "linear"), (14, "clone"), (15, "relu"), (17, "norm")]);
        assert_eq!(pairs(&before, &before), [(11, 11), (12, 12), (14, 14)]);
        assert_eq!(pairs(&before, &after), [(11, 13), (0, 14), (12, 15), (14, 17)]);
        assert_eq!(pairs(&after, &before), [(13, 11), (14, 0), (15, 12), (17, 14)]);
    }

    #[test]
    fn files_of_other_names_are_others() {
        let one = definitions("/home/me/model.py", 10, &[(11, "linear")]);
        let other = definitions("/home/me/train.py", 10, &[(11, "linear")]);
        assert_eq!(pairs(&one, &other), [(11, 0), (0, 11)]);
    }
}
