//! The turns of the program's loop, by which growth is measured: steps, or requests of a program that only calls a
//! model.

use memtrace_trace::named;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

named! {
    /// One turn of the program's loop.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum LoopTurn {
        /// A training step.
        #[default]
        Step => "step",
        /// A call of the model.
        ModelCall => "model call",
        /// A request: several calls of the model, the first of them with the largest input.
        Request => "request",
        /// A range that the program names, in a program without steps.
        Range => "range",
        /// An iteration of a loop, or a call of its function, in a program without steps.
        Iteration => "iteration",
        /// A block of the line that grows, in a program without steps.
        Block => "block",
    }
}

/// A token's input is smaller than a prompt's by this factor, and no more than this factor larger than another's.
const MUCH_SMALLER: u64 = 4;

/// Finds where requests begin in a program that only calls a model.
///
/// A generation calls the model with a prompt, and then with one token after the other, or with few. So a call
/// continues a request if its input is among the smallest of the program, and much smaller than the request's first
/// one. All other calls are requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Requests {
    begun: u32,
    /// The first input of the request.
    first: u64,
    smallest: Option<u64>,
    has_inner_calls: bool,
}

impl Requests {
    /// Observes a call of the model by the bytes that its first allocation requests. Returns the number of the request
    /// that begins, counted from 0.
    pub(super) fn begins(&mut self, input: u64) -> Option<u32> {
        let smallest = self.smallest.map_or(input, |smallest| smallest.min(input));
        self.smallest = Some(smallest);
        let begins = input > self.first / MUCH_SMALLER || input > smallest.saturating_mul(MUCH_SMALLER);
        self.has_inner_calls |= !begins;
        if begins {
            self.first = input;
        }
        self.begun += u32::from(begins);
        begins.then(|| self.begun - 1)
    }

    /// The kind of turn, as far as the calls show it.
    pub(super) const fn turn(&self) -> LoopTurn {
        if self.has_inner_calls { LoopTurn::Request } else { LoopTurn::ModelCall }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_with_the_tokens_of_its_prompt() {
        let begins = |inputs: &[u64]| {
            let mut requests = Requests::default();
            let begins: Vec<u8> = inputs.iter().map(|input| requests.begins(*input).is_some().into()).collect();
            (begins, requests.turn())
        };
        assert_eq!(begins(&[9, 1, 1, 9, 1, 1]), (vec![1, 0, 0, 1, 0, 0], LoopTurn::Request), "prompts and tokens");
        assert_eq!(begins(&[4, 4, 4]), (vec![1, 1, 1], LoopTurn::ModelCall), "batches of one size");
        assert_eq!(begins(&[3, 4, 5]), (vec![1, 1, 1], LoopTurn::ModelCall), "a text that is computed anew");
        assert_eq!(begins(&[5, 3, 4]), (vec![1, 1, 1], LoopTurn::ModelCall), "batches of any size");
        assert_eq!(begins(&[100, 70, 40, 100, 70]), (vec![1; 5], LoopTurn::ModelCall), "requests of three lengths");
        assert_eq!(begins(&[90, 5, 1, 4, 60, 1]), (vec![1, 0, 0, 0, 1, 0], LoopTurn::Request), "drafted tokens");
    }
}
