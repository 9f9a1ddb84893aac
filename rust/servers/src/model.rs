//! The trained model: its variables, and the part of each on each server.

use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use gradring_proto::parameters::floats::Floats;
use gradring_proto::parameters::optimizer::Optimizer;
use gradring_proto::parameters::shard::{Gradient, Payload, Spec};
use gradring_proto::parameters::shards::{Shape, VariablePart, place};
use gradring_proto::parameters::worker::Pulled;
use gradring_proto::wire::codec;

/// A variable of the program.
#[derive(Debug, Clone, Serialize)]
pub struct Variable {
    /// Name, compared between workers.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// True if weight decay applies to the variable.
    pub decays: bool,
}

/// A gradient in the program's memory.
#[derive(Debug, Clone, Copy)]
pub enum Given<'a> {
    /// Gradient of all elements.
    Dense(&'a [f32]),
    /// Indices of rows in any order, and gradients of these rows; those of equal indices are
    /// summed.
    Rows(&'a [usize], &'a [f32]),
}

/// SHA-256 of a model, equal exactly for equal models.
pub type Fingerprint = [u8; 32];

/// All variables, and their places on the servers.
#[derive(Debug)]
pub struct Model {
    optimizer: Optimizer,
    variables: Vec<Variable>,
    shapes: Vec<Shape>,
    /// Parts of variables, by server.
    shards: Vec<Vec<VariablePart>>,
    fingerprint: Fingerprint,
}

impl Variable {
    fn rows(&self) -> Shape {
        Shape {
            rows: self.shape.first().copied().unwrap_or(1),
            width: self.shape.iter().skip(1).product(),
        }
    }
}

impl Model {
    /// Distributes variables over `servers` servers. `placed` maps a variable's index to the one
    /// server that keeps all of it.
    ///
    /// # Panics
    /// If `placed` names a server that does not exist.
    #[must_use]
    pub fn new(
        variables: Vec<Variable>,
        optimizer: Optimizer,
        placed: &BTreeMap<usize, usize>,
        servers: usize,
    ) -> Self {
        let shapes: Vec<_> = variables.iter().map(Variable::rows).collect();
        let all = codec::encode(&(&variables, &optimizer, placed, servers), usize::MAX);
        Self {
            shards: place(&shapes, placed, servers),
            fingerprint: Sha256::digest(all.expect("memory takes all bytes")).into(),
            optimizer,
            variables,
            shapes,
        }
    }

    /// Fingerprint of the variables, the optimizer, the number of servers and the placement.
    #[must_use]
    pub const fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Variables, in order.
    #[must_use]
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Size of a server's weights in bytes.
    pub(crate) fn bytes_on(&self, server: usize) -> u64 {
        let elements: usize = self.shards[server]
            .iter()
            .map(|part| part.elements.len())
            .sum();
        (elements * size_of::<f32>()) as u64
    }

    /// Splits the initial weights into a payload for each server.
    pub(crate) fn initial(&self, weights: &[&[f32]]) -> Vec<Arc<Payload>> {
        let part = |part: &VariablePart| {
            let width = self.shapes[part.variable].width;
            let spec = Spec {
                rows: part.elements.len().checked_div(width).unwrap_or(0),
                width,
                decays: self.variables[part.variable].decays,
            };
            let values = Floats::copied(&weights[part.variable][part.elements.clone()]);
            (spec, Arc::new(values))
        };
        let payload = |parts: &Vec<VariablePart>| {
            Arc::new(Payload::Initial {
                optimizer: self.optimizer,
                parts: parts.iter().map(part).collect(),
            })
        };
        self.shards.iter().map(payload).collect()
    }

    /// Splits gradients into a payload for each server; `given` has an entry for each variable,
    /// `None` without a gradient.
    ///
    /// # Panics
    /// If a gradient does not fit its variable.
    pub(crate) fn gradients(&self, given: &[Option<Given<'_>>]) -> Vec<Arc<Payload>> {
        assert_eq!(given.len(), self.shapes.len());
        let sorted: Vec<_> = given.iter().map(sorted_rows).collect();
        let part = |part: &VariablePart| {
            let (given, rows) = (given[part.variable].as_ref()?, &sorted[part.variable]);
            Some(match given {
                Given::Dense(values) => {
                    Gradient::Dense(Floats::copied(&values[part.elements.clone()]))
                }
                Given::Rows(_, values) => {
                    rows_of(part, self.shapes[part.variable].width, rows, values)
                }
            })
        };
        let payload = |parts: &Vec<VariablePart>| {
            let gradients = parts.iter().map(part).collect();
            Arc::new(Payload::Gradients(gradients))
        };
        self.shards.iter().map(payload).collect()
    }

    /// Copies pulled weights into the program's arrays; `false` if their sizes differ.
    pub(crate) fn put(&self, pulled: &[Pulled], into: &mut [&mut [f32]]) -> bool {
        for (parts, (_, weights)) in zip(&self.shards, pulled) {
            if parts.len() != weights.len() {
                return false;
            }
            for (part, weights) in zip(parts, weights) {
                let target = into
                    .get_mut(part.variable)
                    .and_then(|it| it.get_mut(part.elements.clone()));
                match target {
                    Some(target) if target.len() == weights.len() => {
                        target.copy_from_slice(weights);
                    }
                    _ => return false,
                }
            }
        }
        true
    }
}

/// Pairs of a variable's row and its index in the gradient, sorted by row. Equal rows keep their
/// order.
fn sorted_rows(given: &Option<Given<'_>>) -> Vec<(usize, usize)> {
    let Some(Given::Rows(rows, _)) = given else {
        return vec![];
    };
    let mut sorted: Vec<_> = rows.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    sorted
}

fn rows_of(
    part: &VariablePart,
    width: usize,
    sorted: &[(usize, usize)],
    values: &[f32],
) -> Gradient {
    let (mut rows, mut summed) = (Vec::<u32>::new(), Vec::<f32>::new());
    let Range { start, end } = part.elements;
    // A variable of width 0 has no values.
    if let (Some(first), Some(end)) = (start.checked_div(width), end.checked_div(width)) {
        let from = sorted.partition_point(|it| it.0 < first);
        let to = sorted.partition_point(|it| it.0 < end);
        for &(row, source) in &sorted[from..to] {
            let (row, values) = ((row - first) as u32, &values[source * width..][..width]);
            if rows.last() == Some(&row) {
                let start = summed.len() - width;
                for (sum, value) in zip(&mut summed[start..], values) {
                    *sum += value;
                }
            } else {
                rows.push(row);
                summed.extend_from_slice(values);
            }
        }
    }
    Gradient::Rows {
        rows,
        values: summed.into(),
    }
}

#[cfg(test)]
mod tests {
    use gradring_proto::parameters::optimizer::Sgd;

    use super::*;

    fn model(servers: usize) -> Model {
        let variable = |name: &str, shape: &[usize]| Variable {
            name: name.into(),
            shape: shape.into(),
            decays: true,
        };
        let variables = vec![variable("table", &[7, 2]), variable("bias", &[])];
        let optimizer = Optimizer::Sgd(Sgd {
            momentum: 0.0,
            is_nesterov: false,
        });
        Model::new(variables, optimizer, &BTreeMap::new(), servers)
    }

    #[test]
    fn weights_come_back_from_the_servers_as_they_went_there() {
        let table: Vec<f32> = (0..14).map(|it| it as f32).collect();
        for servers in 1..=4 {
            let model = model(servers);
            let payloads = model.initial(&[&table, &[99.0]]);
            let pulled = payloads.iter().map(|payload| match &**payload {
                Payload::Initial { parts, .. } => {
                    let weights = parts.iter().map(|(_, weights)| weights.clone());
                    (Default::default(), weights.collect())
                }
                Payload::Gradients(_) => panic!("not initial"),
            });
            let pulled: Vec<Pulled> = pulled.collect();
            let (mut first, mut second) = ([0.0; 14], [0.0; 1]);
            assert!(model.put(&pulled, &mut [&mut first, &mut second]));
            assert_eq!((&first[..], second), (&table[..], [99.0]));
            assert!(!model.put(&pulled, &mut [&mut [0.0; 13], &mut second]));
        }
    }

    #[test]
    fn rows_go_to_the_server_of_their_part_in_order_and_repeated_ones_add_up() {
        let model = model(2);
        let values = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        let given = Given::Rows(&[6, 0, 6], &values);
        let mut found = BTreeMap::new();
        for (parts, payload) in zip(&model.shards, model.gradients(&[Some(given), None])) {
            let Payload::Gradients(gradients) = &*payload else {
                panic!("not gradients");
            };
            for (part, gradient) in zip(parts, gradients) {
                let Some(Gradient::Rows { rows, values }) = gradient else {
                    assert_eq!((part.variable, gradient), (1, &None));
                    continue;
                };
                for (row, values) in zip(rows, values.chunks(2)) {
                    found.insert(part.elements.start / 2 + *row as usize, values.to_vec());
                }
            }
        }
        assert_eq!(
            found,
            [(0, vec![10.0, 20.0]), (6, vec![101.0, 202.0])].into()
        );
    }
}
