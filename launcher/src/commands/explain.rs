//! `memtrace explain`: a rule's section of docs/reference/diagnostics.md, which is inside the binary, with the code of
//! the rule. The texts have one source each: the page has the sentences, and the rule the code, its cost and the link.

use std::fmt::Write;

use anyhow::bail;
use memtrace_analysis::diagnostics::diagnostic_rules;
use memtrace_analysis::rules::{Framework, RuleId};
use memtrace_analysis::suggestions::suggestion_rules;

use super::docs::text_of;
use super::similar_names::did_you_mean;
use crate::cli;
use crate::message::WithHelp;
use crate::output::{self, Printed};

/// The page that has a section for each rule.
const PAGE: &str = "reference/diagnostics";
/// The placeholders of code, and what they show without a run.
const WITHOUT_RUN: [(&str, &str); 8] = [
    ("{classes}", "\"Block\""),
    ("{layers}", "blocks.* (12 of Block)"),
    ("{call}", "where the model is called"),
    ("{place}", "the line that the report names"),
    ("{optimizer}", "AdamW"),
    ("{evaluation}", "the evaluation"),
    ("{twice}", "8"),
    ("{count}", "4"),
];

/// The parts of a rule that the page does not have.
struct Rule {
    id: RuleId,
    /// One sentence or the action.
    title: &'static str,
    cost: Option<&'static str>,
    code: &'static [&'static str],
    link: &'static str,
}

/// Prints a rule, or the list of all rules.
pub(crate) fn explain(options: &cli::Explain) -> anyhow::Result<()> {
    let text = match &options.rule {
        Some(name) => explained(&find(name)?),
        None => list(),
    };
    output::print(Printed::Text(&text))?;
    Ok(())
}

/// The rules of issues, and those of suggestions.
fn rules() -> (Vec<Rule>, Vec<Rule>) {
    let issues = diagnostic_rules().into_iter();
    let issues =
        issues.map(|rule| Rule { id: rule.id, title: rule.meaning, cost: None, code: rule.code, link: rule.link });
    let suggestions = suggestion_rules().iter().map(|rule| Rule {
        id: rule.id,
        title: rule.action,
        cost: (!rule.code.is_empty()).then(|| rule.cost.text()),
        code: rule.code,
        link: rule.link,
    });
    (issues.collect(), suggestions.collect())
}

fn list() -> String {
    let (issues, suggestions) = rules();
    let all = issues.iter().chain(&suggestions);
    let width = all.map(|rule| rule.id.as_str().len()).max().unwrap_or_default();
    let mut text = String::new();
    for (heading, rules) in [("Issues", issues), ("\nSuggestions", suggestions)] {
        let _ = writeln!(text, "{heading}");
        for rule in rules {
            let _ = writeln!(text, "  {:width$}  {}", rule.id.as_str(), rule.title);
        }
    }
    text.push_str("\nmemtrace explain RULE explains a rule: memtrace explain leak\n");
    text
}

/// The rule of this name.
fn find(given: &str) -> anyhow::Result<Rule> {
    let requested = given.trim().to_lowercase().replace('_', "-");
    let (issues, suggestions) = rules();
    let mut all: Vec<Rule> = issues.into_iter().chain(suggestions).collect();
    if let Some(at) = all.iter().position(|rule| rule.id.as_str() == requested) {
        return Ok(all.swap_remove(at));
    }
    let names = all.iter().map(|rule| rule.id.as_str());
    let help = did_you_mean(&requested, names, |name| name, "memtrace explain lists all rules");
    bail!(WithHelp::new(format!("there is no rule {given}"), help))
}

/// The text of a rule.
fn explained(rule: &Rule) -> String {
    let mut text = format!("{}\n\n{}\n", rule.id, section(rule.id.as_str()).replace("**", ""));
    if !rule.code.is_empty() {
        let code = rule.code.iter().map(|line| filled(line));
        let _ = write!(text, "\nCode:\n\n{}", code.map(|line| format!("    {line}\n")).collect::<String>());
    }
    let settings: Vec<&str> =
        Framework::ALL.iter().filter_map(|framework| framework.setting(rule.id)).map(|setting| setting.text).collect();
    if !settings.is_empty() {
        let _ = write!(text, "\nIn frameworks:\n\n");
        settings.iter().for_each(|setting| _ = writeln!(text, "    {setting}"));
    }
    if let Some(cost) = rule.cost {
        let _ = write!(text, "\nCost: {cost}\n");
    }
    if !rule.link.is_empty() {
        let _ = write!(text, "\nMore: {}\n", rule.link);
    }
    text
}

/// The section of a rule on the page, without its heading.
fn section(name: &str) -> &'static str {
    let page = text_of(PAGE).unwrap_or_default();
    let after = page.split_once(&format!("\n### {name}\n")).map_or("", |(_, after)| after);
    let end = after.find("\n##").unwrap_or(after.len());
    after[..end].trim()
}

/// A line of code with examples in the places of its placeholders.
fn filled(line: &str) -> String {
    WITHOUT_RUN.iter().fold(line.to_owned(), |line, (name, value)| line.replace(name, value))
}

#[cfg(test)]
mod tests {
    use memtrace_analysis::rules::RuleId;

    use super::*;

    #[test]
    fn every_rule_has_a_section_code_and_a_link() {
        for id in RuleId::ALL {
            let rule = find(id.as_str()).unwrap();
            assert!(!section(id.as_str()).is_empty(), "{id}");
            let is_several = id == RuleId::CombinedChanges;
            assert!(is_several || !rule.code.is_empty(), "{id} has no code");
            assert!(is_several || rule.link.starts_with("https://"), "{id} has no link");
            let text = explained(&rule);
            let (_, code) = text.split_once("\nCode:\n").unwrap_or_default();
            for placeholder in ["{classes}", "{layers}", "{call}", "{place}", "{optimizer}", "{count}", "{twice}"] {
                assert!(!code.contains(placeholder), "{id}: {code}");
            }
        }
    }

    #[test]
    fn a_section_ends_at_the_next_heading() {
        let text = section("leak");
        assert!(text.starts_with("The memory that one line") && text.contains("**Limits:**"), "{text}");
        assert!(!text.contains('#') && !section("worker-context").contains("## "), "{text}");
    }
}
