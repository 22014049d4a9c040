// Prints the grammar faults of Markdown files and of doc comments that are help texts, one a line. The exit status is 1 if there is one.
import { readFileSync } from "node:fs";
import { LocalLinter } from "harper.js";
import { binary } from "harper.js/binary";

// Rules that find no faults in this documentation. Harper has some 880 rules; all others are on.
const OFF = [
    // Other checks have these: spelling of names, headings, the style of figures and units.
    ...["SpellCheck", "SplitWords", "MergeWords", "OrthographicConsistency", "SentenceCapitalization", "UseTitleCase", "CompoundNouns"],
    ...["ExpandMemoryShorthands", "ExpandTimeShorthands", "ExpandStandardInputAndOutput", "ExpandControl", "ExpandDirectory"],
    ...["ExpandMinimum", "ExpandConfiguration", "ExpandPerformance", "NumericRangeEnDash", "UseEllipsisCharacter", "EllipsisLength", "OxfordComma"],
    // These misread code, tables, and names such as `eager loop` or `(A)`.
    ...["AnA", "MissingTo", "MissingPreposition", "MissingDeterminer", "UnclosedQuotes", "WrongNegative", "DisjointPrefixes", "SingleBe"],
    ...["OneOfTheSingular", "ThatThan", "ToTwoToo", "Overall", "PhrasalVerbAsCompoundNoun", "QuantifierNumeralConflict", "HavePronoun"],
    ...["ExpandAlloc", "Dashes", "Spaces", "CondenseAllThe", "ItsContraction", "SimplePastToPastParticiple", "NoFrenchSpaces", "CapitalizePersonalPronouns"],
];

// Words that a rule does not know in PyTorch's or Rust's meaning.
const WORDS = { MassNouns: /storage|preemption|finding|pending|outside|synchronization/ };
// Rows of fields and lists of links, which are no sentences: a line that begins so.
const NO_SENTENCE = { LongSentences: /^(?:\| \d+ |- Decisions: )/ };

// The doc comments of a Rust file at the same lines, all else empty.
const helpTexts = (source) =>
    source
        .split("\n")
        .map((line) => /^\s*\/\/\/ ?(.*)$/.exec(line)?.[1] ?? "")
        .join("\n");

const linter = new LocalLinter({ binary });
const rules = await linter.getDefaultLintConfig();
for (const rule of OFF.filter((name) => !(name in rules))) {
    throw new Error(`harper.js has no rule ${rule}`);
}
await linter.setLintConfig(Object.fromEntries(Object.keys(rules).map((name) => [name, rules[name] && !OFF.includes(name)])));

const check = async (path, source) => {
    const text = path.endsWith(".rs") ? helpTexts(source) : source;
    const [characters, lines, found] = [Array.from(text), text.split("\n"), []];
    for (const [rule, lints] of Object.entries(await linter.organizedLints(text, { language: "markdown" }))) {
        for (const lint of lints) {
            const problem = lint.get_problem_text();
            // Offsets are in characters, not in the units of JavaScript's strings.
            const line = characters.slice(0, lint.span().start).join("").split("\n").length;
            if (!WORDS[rule]?.test(problem) && !NO_SENTENCE[rule]?.test(lines[line - 1])) {
                found.push({ line, text: `${path}:${line}: '${problem.slice(0, 60).replaceAll("\n", " ")}': ${lint.message()} (${rule})` });
            }
        }
    }
    return found.sort((a, b) => a.line - b.line).map(({ text: message }) => message);
};

// A sentence that must be found, so that a linter without rules fails.
const samples = [
    ["a.md", "This are a example of an training."],
    ["a.rs", "/// The the option.\nfn a() {}"],
];
for (const [path, source] of samples) {
    if ((await check(path, source)).length === 0) {
        throw new Error(`no fault is found in: ${source}`);
    }
}

let count = 0;
for (const path of process.argv.slice(2)) {
    for (const message of await check(path, readFileSync(path, "utf8"))) {
        console.log(message);
        count += 1;
    }
}
console.log(`${process.argv.length - 2} files checked: ${count} ${count === 1 ? "fault" : "faults"} of grammar`);
process.exit(count === 0 ? 0 : 1);
