//! Finds where functions begin and end in Python source, by indentation.

/// The lines of a function, counted from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Body {
    pub(crate) first: u32,
    pub(crate) last: u32,
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn is_def(line: &str) -> bool {
    let line = line.trim_start();
    line.strip_prefix("async ").unwrap_or(line).starts_with("def ") || line.starts_with("class ")
}

/// The line of the `def` with this name that encloses `line`. `None` if there is none.
pub(crate) fn start_of(text: &[String], line: u32, name: &str) -> Option<u32> {
    let name = name.rsplit('.').next().unwrap_or(name);
    let mut within = usize::MAX;
    for number in (1..=line).rev() {
        let text = text.get(number as usize - 1)?;
        let code = text.trim_start();
        // A closing bracket of a multi-line signature is indented like the `def`.
        if code.is_empty() || code.starts_with(['#', ')', ']', '}']) {
            continue;
        }
        let here = indent(text);
        let def = code.strip_prefix("async ").unwrap_or(code).strip_prefix("def ");
        let is_it = def.and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.starts_with(['(', '[', ' ']));
        if is_it && (here < within || number == line) {
            return Some(number);
        }
        within = within.min(here);
    }
    None
}

/// The last line of the function that begins at `first`, which includes its decorators.
pub(crate) fn end_of(text: &[String], first: u32) -> u32 {
    let at = |number: u32| text.get((number as usize).checked_sub(1)?).map(String::as_str);
    let mut def = first;
    while at(def).is_some_and(|line| !is_def(line)) && def < first.saturating_add(50) {
        def += 1;
    }
    let Some(head) = at(def).filter(|line| is_def(line)) else { return first };
    let depth = indent(head);
    let mut last = def;
    // A multi-line signature ends with a line that is not indented more than the `def`.
    let mut open = 0i64;
    let mut in_head = true;
    for number in def.. {
        let Some(line) = at(number) else { break };
        let code = line.trim_start();
        if in_head {
            let code = line.split('#').next().unwrap_or(line);
            open += code.chars().map(|c| i64::from("([{".contains(c)) - i64::from(")]}".contains(c))).sum::<i64>();
            in_head = open > 0;
            last = number;
        } else if !code.is_empty() && !code.starts_with('#') {
            if indent(line) <= depth {
                break;
            }
            last = number;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_begin_and_end() {
        let text = "class A:\n    def forward(self, x):\n        y = x\n\n        # note\n        return y\n\n    \
                    @no_grad()\n    def forward(\n        self,\n    ):\n        def inner(x):\n            \
                    return x\n        return 1\n\nx = 1\n";
        let text: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_eq!((start_of(&text, 3, "forward"), end_of(&text, 2)), (Some(2), 6));
        assert_eq!((start_of(&text, 14, "A.forward"), end_of(&text, 8)), (Some(9), 14));
        assert_eq!(start_of(&text, 13, "inner"), Some(12));
        assert_eq!(start_of(&text, 13, "forward"), Some(9));
        assert_eq!((start_of(&text, 16, "forward"), start_of(&text, 99, "forward")), (None, None));
        assert_eq!(end_of(&text, 99), 99);
    }
}
