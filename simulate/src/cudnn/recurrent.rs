//! Recurrent layers: the layout of the weights, the workspace, and the space that training reserves.
//!
//! The weights and the reserved space follow from the definition of the cells. The workspace was measured by asking
//! cuDNN 9.19 for [`Layers`] and [`Sequences`] of random sizes (`simulate/measurements/recurrent_spaces.py`). The
//! model's error is below 4 KiB, except for training with several layers in one direction, or with persistent weights.
//! There it is below 14 % of the workspace (below 1 % in nine of ten rows).

/// The part of a workspace that cuBLAS takes for one layer in one direction, in bytes.
const MATRIX_MULTIPLICATION: u64 = 8 << 20;

/// The alignment of a workspace's parts, in bytes.
const ALIGNMENT: u64 = 256;

/// The function that a layer computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// One activation function, `nn.RNN`.
    Simple,
    /// Long short-term memory, `nn.LSTM`.
    Lstm,
    /// Gated recurrent unit, `nn.GRU`.
    Gru,
}

/// How many numbers of each unit of a layer a [`Cell`] needs.
struct Numbers {
    /// Gates, each with a matrix for the input, a matrix for the state, and two biases.
    gates: u64,
    /// Kept for the backward pass, each time step.
    reserved: u64,
    /// Of the initial and final states: `h`, and `c` of an LSTM.
    states: u64,
    /// For the state during the forward pass.
    forward_state: u64,
    /// For the state during the backward pass.
    backward_state: u64,
    /// Added in the backward pass by an algorithm that keeps its weights on the multiprocessors, each time step.
    persistent_backward: u64,
}

impl Cell {
    fn numbers(self) -> Numbers {
        let [gates, reserved, states, forward_state, backward_state, persistent_backward] = match self {
            Cell::Simple => [1, 1, 1, 1, 1, 9],
            Cell::Lstm => [4, 5, 2, 6, 3, 12],
            Cell::Gru => [3, 6, 1, 3, 1, 14],
        };
        Numbers { gates, reserved, states, forward_state, backward_state, persistent_backward }
    }
}

/// Recurrent layers on top of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// The function that they compute.
    pub cell: Cell,
    /// Whether the algorithm keeps the weights on the multiprocessors (`CUDNN_RNN_ALGO_PERSIST_...`).
    pub persistent: bool,
    /// Their number.
    pub layers: u64,
    /// 2 if sequences are read in both directions, else 1.
    pub directions: u64,
    /// The size of the input of the first layer, for each time step.
    pub input: u64,
    /// The size of the state.
    pub hidden: u64,
    /// The size to which an LSTM projects its output.
    pub projection: Option<u64>,
    /// Whether elements are dropped between layers.
    pub dropout: bool,
    /// The data type, `cudnnDataType_t`.
    pub data_type: i32,
    /// The size of an element in bytes.
    pub element_bytes: u64,
}

/// A batch of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// Their number.
    pub number: u64,
    /// The length of the longest.
    pub longest: u64,
    /// The sum of the lengths.
    pub steps: u64,
    /// Whether they are stored one time step after another, without padding.
    pub packed: bool,
}

/// A part of the weights: rows and columns, and where it begins, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first element.
    pub offset: u64,
    /// The number of rows.
    pub rows: u64,
    /// The number of columns.
    pub columns: u64,
}

impl Layers {
    /// The size of the output of one layer in one direction.
    fn output(&self) -> u64 {
        self.projection.unwrap_or(self.hidden)
    }

    /// Layers, each direction counted.
    fn pseudo_layers(&self) -> u64 {
        self.layers * self.directions
    }

    fn both_directions(&self) -> bool {
        self.directions == 2
    }

    /// The size of the input of a layer.
    fn input_of(&self, pseudo_layer: u64) -> u64 {
        if pseudo_layer < self.directions { self.input } else { self.output() * self.directions }
    }

    /// The elements of the matrices of a layer in one direction.
    fn matrices_of(&self, pseudo_layer: u64) -> u64 {
        let gates = self.cell.numbers().gates * self.hidden * (self.input_of(pseudo_layer) + self.output());
        gates + self.projection.unwrap_or(0) * self.hidden
    }

    /// The elements of all matrices before those of a layer. For the number of layers, those of all layers.
    fn matrices_before(&self, pseudo_layer: u64) -> u64 {
        (0..pseudo_layer).map(|layer| self.matrices_of(layer)).sum()
    }

    /// The size of the weights in bytes.
    pub fn weights(&self) -> u64 {
        let biases = 2 * self.cell.numbers().gates * self.hidden * self.pseudo_layers();
        (self.matrices_before(self.pseudo_layers()) + biases) * self.element_bytes
    }

    /// A matrix of a layer in one direction: first those of the gates for the input, then those for the state, then the
    /// projection. `None` if there is no such matrix.
    pub fn matrix(&self, pseudo_layer: u64, number: u64) -> Option<Part> {
        let gates = self.cell.numbers().gates;
        let (input, output) = (self.input_of(pseudo_layer), self.output());
        let of_state = gates * self.hidden * input;
        let (offset, rows, columns) = if number < gates {
            (number * self.hidden * input, self.hidden, input)
        } else if number < 2 * gates {
            (of_state + (number - gates) * self.hidden * output, self.hidden, output)
        } else {
            (of_state + gates * self.hidden * output, self.projection.filter(|_| number == 2 * gates)?, self.hidden)
        };
        let exists = pseudo_layer < self.pseudo_layers();
        exists.then(|| Part { offset: self.matrices_before(pseudo_layer) + offset, rows, columns })
    }

    /// A bias of a layer in one direction, in the order of the gates' matrices. `None` if there is no such bias.
    pub fn bias(&self, pseudo_layer: u64, number: u64) -> Option<Part> {
        let of_layer = 2 * self.cell.numbers().gates;
        let offset = self.matrices_before(self.pseudo_layers()) + (pseudo_layer * of_layer + number) * self.hidden;
        let exists = pseudo_layer < self.pseudo_layers() && number < of_layer;
        exists.then_some(Part { offset, rows: self.hidden, columns: 1 })
    }

    /// The bytes that the forward pass of training keeps for the backward pass.
    pub fn reserve(&self, sequences: &Sequences) -> u64 {
        let units = sequences.steps * self.hidden * self.directions;
        let projected = self.projection.map_or(0, |size| units + sequences.steps * size * self.directions);
        let between_layers = self.layers.saturating_sub(1);
        let elements = (self.cell.numbers().reserved * units + projected) * self.layers + between_layers * units;
        let dropped = sequences.longest * sequences.number * self.output() * self.directions * self.directions;
        let masks = if self.dropout { (between_layers * dropped).div_ceil(8) } else { 0 };
        elements * self.element_bytes + masks + ALIGNMENT
    }

    /// The bytes of the workspace of one pass: of the forward pass for inference, else of any pass of training.
    pub fn workspace(&self, sequences: &Sequences, training: bool) -> u64 {
        let forward = self.forward(sequences);
        let elements = if training { forward.max(self.backward(sequences)) } else { forward };
        let matrices = self.matrices_before(self.pseudo_layers());
        MATRIX_MULTIPLICATION * self.pseudo_layers() + (matrices + elements) * self.element_bytes + ALIGNMENT
    }

    /// Whether the algorithm that keeps the weights on the multiprocessors runs. cuDNN has none for bfloat16, and none
    /// for packed sequences.
    fn runs_persistent(&self, sequences: &Sequences) -> bool {
        self.persistent && self.data_type != super::BFLOAT16 && !sequences.packed
    }

    /// The elements of the workspace for copies of padded inputs, outputs and states, in one direction of time.
    fn copies(&self, sequences: &Sequences) -> u64 {
        if sequences.packed {
            return 0;
        }
        let numbers = self.cell.numbers();
        let states = self.output() + (numbers.states - 1) * self.hidden;
        sequences.steps * (self.input + self.output() * self.directions)
            + sequences.number * self.pseudo_layers() * 2 * states
    }

    /// The elements of the workspace for states, of which each direction needs some, and two more if there are two.
    fn states(&self, sequences: &Sequences, each_direction: u64) -> u64 {
        sequences.number * self.hidden * self.pseudo_layers() * (each_direction + 2 * (self.directions - 1))
    }

    /// The elements of the workspace for states with an algorithm that keeps the weights on the multiprocessors.
    fn persistent_states(&self, sequences: &Sequences) -> u64 {
        self.states(sequences, self.cell.numbers().backward_state + u64::from(!self.both_directions()))
    }

    /// The elements of the workspace of a forward pass, without the matrices.
    fn forward(&self, sequences: &Sequences) -> u64 {
        let numbers = self.cell.numbers();
        let units = sequences.steps * self.hidden;
        let mut each_step = self.directions * (numbers.gates + 2 * (self.directions - 1));
        each_step += if self.projection.is_some() { self.directions } else { 0 };
        each_step += u64::from(self.dropout && !self.both_directions());
        let states = if self.runs_persistent(sequences) {
            each_step += 4 * numbers.gates;
            self.persistent_states(sequences)
        } else {
            self.states(sequences, numbers.forward_state)
        };
        units * each_step + states + self.copies(sequences)
    }

    /// The elements of the workspace of a backward pass, without the matrices.
    fn backward(&self, sequences: &Sequences) -> u64 {
        let numbers = self.cell.numbers();
        let units = sequences.steps * self.hidden;
        let widest = sequences.steps * self.input.max(self.hidden) * self.directions * self.directions;
        let projected = if self.projection.is_some() { units * self.directions } else { 0 };
        let (own, states) = if self.runs_persistent(sequences) {
            let layers = 1 + u64::from(self.layers > 1);
            (units * (self.directions * layers + numbers.persistent_backward), self.persistent_states(sequences))
        } else {
            (self.gradients(sequences), self.states(sequences, numbers.backward_state))
        };
        widest + own + projected + states + 2 * self.copies(sequences)
    }

    /// The elements of the workspace for the gradients of outputs, with the standard algorithm.
    fn gradients(&self, sequences: &Sequences) -> u64 {
        let units = sequences.steps * self.hidden;
        match (self.layers, self.directions) {
            (1, _) => units * self.directions,
            (_, 1) => {
                let steps = self.concurrent_steps(sequences).min(sequences.longest);
                units * steps / sequences.longest.max(1)
            }
            _ => 2 * units * self.directions,
        }
    }

    /// The time steps whose gradients exist at once. Layers work on different time steps, each on several.
    fn concurrent_steps(&self, sequences: &Sequences) -> u64 {
        let long = sequences.longest >= 128;
        let of_layer: u64 = match sequences.number {
            0..=8 => 16,
            9..=16 => 8,
            17..=96 => 4,
            _ => 2,
        };
        let of_layer = if long { of_layer.max(8) } else { of_layer };
        of_layer * self.layers + of_layer.max(8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::measurements::{self, bytes};

    /// A measured configuration, and what cuDNN requested.
    struct Measured {
        layers: Layers,
        sequences: Sequences,
        weights: u64,
        inference: u64,
        training: u64,
        reserve: u64,
    }

    fn measured() -> Vec<Measured> {
        let rows = measurements::rows("recurrent-spaces");
        rows.iter()
            .map(|row| {
                let hidden = bytes(&row["hidden"]);
                let data_type = bytes(&row["data_type"]) as i32;
                Measured {
                    layers: Layers {
                        cell: [Cell::Simple, Cell::Lstm, Cell::Gru][bytes(&row["mode"]) as usize - 1],
                        persistent: bytes(&row["algorithm"]) != 0,
                        layers: bytes(&row["layers"]),
                        directions: bytes(&row["directions"]),
                        input: bytes(&row["input"]),
                        hidden,
                        projection: Some(bytes(&row["projection"])).filter(|size| *size != hidden),
                        dropout: bytes(&row["dropout"]) != 0,
                        data_type,
                        element_bytes: crate::cudnn::element_bytes(data_type).unwrap(),
                    },
                    sequences: Sequences {
                        number: bytes(&row["batch"]),
                        longest: bytes(&row["longest"]),
                        steps: bytes(&row["steps"]),
                        packed: bytes(&row["packed"]) != 0,
                    },
                    weights: bytes(&row["weights"]),
                    inference: bytes(&row["inference_workspace"]),
                    training: bytes(&row["training_workspace"]),
                    reserve: bytes(&row["reserve"]),
                }
            })
            .collect()
    }

    #[test]
    fn the_size_of_the_weights_is_exact() {
        for row in measured() {
            assert_eq!(row.layers.weights(), row.weights, "{:?}", row.layers);
        }
    }

    #[test]
    fn the_reserved_space_is_exact_but_for_alignment() {
        for row in measured() {
            let error = row.layers.reserve(&row.sequences).abs_diff(row.reserve);
            assert!(error < 1 << 10, "{error} bytes: {:?} {:?}", row.layers, row.sequences);
        }
    }

    #[test]
    fn the_workspace_of_inference_is_exact_but_for_alignment() {
        for row in measured() {
            let error = row.layers.workspace(&row.sequences, false).abs_diff(row.inference);
            assert!(error < 4 << 10, "{error} bytes: {:?} {:?}", row.layers, row.sequences);
        }
    }

    #[test]
    fn the_workspace_of_training_is_exact_for_the_standard_algorithm_with_one_layer_or_both_directions() {
        for row in measured() {
            let approximate = row.layers.persistent || row.layers.layers > 1 && row.layers.directions == 1;
            let allowed = if approximate { row.training * 14 / 100 } else { 4 << 10 };
            let error = row.layers.workspace(&row.sequences, true).abs_diff(row.training);
            assert!(error < allowed, "{error} bytes of {}: {:?} {:?}", row.training, row.layers, row.sequences);
        }
    }

    #[test]
    fn the_parts_of_the_weights_follow_each_other() {
        let layers = Layers {
            cell: Cell::Lstm,
            persistent: false,
            layers: 2,
            directions: 2,
            input: 5,
            hidden: 7,
            projection: Some(3),
            dropout: false,
            data_type: 0,
            element_bytes: 4,
        };
        let matrices = (0..4).flat_map(|layer| (0..9).map(move |number| layers.matrix(layer, number)));
        let biases = (0..4).flat_map(|layer| (0..8).map(move |number| layers.bias(layer, number)));
        let end = matrices.chain(biases).fold(0, |end, part| {
            let part = part.expect("an LSTM with a projection has 9 matrices and 8 biases");
            assert_eq!(part.offset, end);
            end + part.rows * part.columns
        });
        assert_eq!(end * 4, layers.weights());
        assert_eq!((layers.matrix(0, 9), layers.bias(4, 0)), (None, None));
    }
}
