//! The trained model: its variables, and the part of each on each server.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use gradring_proto::parameters::changes::ChangedRows;
use gradring_proto::parameters::float::FloatType;
use gradring_proto::parameters::floats::{FloatSlice, Floats};
use gradring_proto::parameters::identity::Version;
use gradring_proto::parameters::optimizer::Optimizer;
use gradring_proto::parameters::shard::{Gradient, Payload, Spec};
use gradring_proto::parameters::shards::{Extent, VariablePart, place};
use gradring_proto::parameters::worker::Pulled;
use gradring_proto::wire::codec;

use super::values::Values as _;

/// A variable of the program.
#[derive(Debug, Clone, Serialize)]
pub struct Variable {
    /// Name, compared between workers.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Element type.
    pub float_type: FloatType,
    /// True if weight decay applies to the variable.
    pub decays: bool,
}

/// A gradient in the program's memory.
#[derive(Debug, Clone, Copy)]
pub enum Given<'a> {
    /// Gradient of all elements.
    Dense(FloatSlice<'a>),
    /// Indices of rows in any order, and gradients of these rows; those of equal indices are
    /// summed.
    Rows(&'a [usize], FloatSlice<'a>),
}

/// Weights of all variables at one pull.
#[derive(Debug)]
pub struct PulledModel {
    model: Arc<Model>,
    pulled: Vec<Pulled>,
    /// Rows that have changed, by server and part; empty if any weight may have changed.
    changed: Vec<Vec<ChangedRows>>,
}

/// SHA-256 of a model, equal exactly for equal models.
pub type Fingerprint = [u8; 32];

/// All variables, and their places on the servers.
#[derive(Debug)]
pub struct Model {
    optimizer: Optimizer,
    variables: Vec<Variable>,
    extents: Vec<Extent>,
    /// Parts of variables, by server.
    shards: Vec<Vec<VariablePart>>,
    /// Server and index on it of each part of a variable, by variable.
    places: Vec<Vec<(usize, usize)>>,
    fingerprint: Fingerprint,
}

impl Variable {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size of all elements in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.elements() * self.float_type.size_bytes()
    }

    fn extent(&self) -> Extent {
        Extent {
            rows: self.shape.first().copied().unwrap_or(1),
            width: self.shape.iter().skip(1).product(),
            element_bytes: self.float_type.size_bytes(),
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
        let extents: Vec<_> = variables.iter().map(Variable::extent).collect();
        let all = codec::encode(&(&variables, &optimizer, placed, servers), usize::MAX);
        let shards = place(&extents, placed, servers);
        let mut places = vec![vec![]; variables.len()];
        for (server, parts) in shards.iter().enumerate() {
            for (index, part) in parts.iter().enumerate() {
                places[part.variable].push((server, index));
            }
        }
        Self {
            shards,
            places,
            fingerprint: Sha256::digest(all.expect("memory takes all bytes")).into(),
            optimizer,
            variables,
            extents,
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
        let bytes = |part: &VariablePart| {
            part.elements.len() * self.variables[part.variable].float_type.size_bytes()
        };
        self.shards[server].iter().map(bytes).sum::<usize>() as u64
    }

    /// Splits the initial weights into a payload for each server.
    pub(crate) fn initial(&self, weights: &[FloatSlice<'_>]) -> Vec<Arc<Payload>> {
        let part = |part: &VariablePart| {
            let width = self.extents[part.variable].width;
            let spec = Spec {
                rows: part.elements.len().checked_div(width).unwrap_or(0),
                width,
                decays: self.variables[part.variable].decays,
            };
            let values = weights[part.variable].copied(part.elements.clone());
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
        assert_eq!(given.len(), self.extents.len());
        let sorted: Vec<_> = given.iter().map(sorted_rows).collect();
        let part = |part: &VariablePart| {
            let (given, rows) = (given[part.variable].as_ref()?, &sorted[part.variable]);
            Some(match given {
                Given::Dense(values) => Gradient::Dense(values.copied(part.elements.clone())),
                Given::Rows(_, values) => {
                    rows_of(part, self.extents[part.variable].width, rows, values)
                }
            })
        };
        let payload = |parts: &Vec<VariablePart>| {
            let gradients = parts.iter().map(part).collect();
            Arc::new(Payload::Gradients(gradients))
        };
        self.shards.iter().map(payload).collect()
    }
}

impl PulledModel {
    /// Pairs weights with their model; `None` if they have other shapes or element types.
    #[must_use]
    pub fn new(
        model: Arc<Model>,
        pulled: Vec<Pulled>,
        changed: Vec<Vec<ChangedRows>>,
    ) -> Option<Self> {
        let there = |(_, weights): &Pulled| {
            let each = weights.iter().map(|it| (it.len(), it.float_type()));
            each.collect::<Vec<_>>()
        };
        let wanted = |parts: &Vec<VariablePart>| {
            let float_type = |part: &VariablePart| model.variables[part.variable].float_type;
            let each = parts.iter().map(|it| (it.elements.len(), float_type(it)));
            each.collect::<Vec<_>>()
        };
        let fits = pulled.iter().map(there).eq(model.shards.iter().map(wanted));
        fits.then_some(Self {
            model,
            pulled,
            changed,
        })
    }

    /// Oldest version of the weights.
    pub(crate) fn version(&self) -> Option<Version> {
        self.pulled.iter().map(|(point, _)| point.version).min()
    }

    /// The variables.
    #[must_use]
    pub fn variables(&self) -> &[Variable] {
        self.model.variables()
    }

    /// Parts of a variable with their weights, and the rows of each that have changed.
    fn parts(
        &self,
        variable: usize,
    ) -> impl Iterator<Item = (&VariablePart, &Floats, Option<&Vec<u32>>)> {
        let places = self.model.places[variable].iter();
        places.map(|&(server, index)| {
            let changed = self.changed.get(server).and_then(|it| it.get(index));
            let part = &self.model.shards[server][index];
            let weights = &*self.pulled[server].1[index];
            (part, weights, changed.and_then(Option::as_ref))
        })
    }

    /// Copies the weights of a variable into `into`, as bytes.
    ///
    /// # Panics
    /// If `into` is shorter than the variable.
    pub fn put(&self, variable: usize, into: &mut [u8]) {
        let all = 0..self.variables()[variable].elements();
        self.put_range(variable, &all, into);
    }

    /// First elements of a variable, at most so many.
    pub(crate) fn first(&self, variable: usize, count: usize) -> Floats {
        let Variable { float_type, .. } = self.variables()[variable];
        let count = count.min(self.variables()[variable].elements());
        let mut first = Floats::repeated(float_type, 0.0, count);
        self.put_range(variable, &(0..count), first.bytes_mut());
        first
    }

    /// Ranges of a variable's elements that have changed since the pull before.
    pub fn changed(&self, variable: usize) -> Vec<Range<usize>> {
        let width = self.model.extents[variable].width;
        let mut ranges = Vec::new();
        for (part, _, changed) in self.parts(variable) {
            let Range { start, .. } = part.elements;
            let row = |row: &u32| {
                let first = start + *row as usize * width;
                first..first + width
            };
            match changed {
                Some(rows) => ranges.extend(rows.iter().map(row)),
                None => ranges.push(part.elements.clone()),
            }
        }
        ranges
    }

    /// Copies the elements in `range` of a variable to the same places of `into`, as bytes.
    ///
    /// # Panics
    /// If `into` is shorter than the range.
    pub fn put_range(&self, variable: usize, range: &Range<usize>, into: &mut [u8]) {
        let size = self.variables()[variable].float_type.size_bytes();
        for (part, weights, _) in self.parts(variable) {
            let start = range.start.max(part.elements.start);
            let end = range.end.min(part.elements.end);
            if start < end {
                let first = start - part.elements.start;
                let weights = &weights.bytes()[size * first..][..size * (end - start)];
                into[size * start..size * end].copy_from_slice(weights);
            }
        }
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
    values: &FloatSlice<'_>,
) -> Gradient {
    let Range { start, end } = part.elements;
    // A variable of width 0 has no values.
    let first = start.checked_div(width).unwrap_or(0);
    let end = end.checked_div(width).unwrap_or(0);
    let from = sorted.partition_point(|it| it.0 < first);
    let to = sorted.partition_point(|it| it.0 < end);
    let ranges = sorted[from..to]
        .iter()
        .map(|&(row, source)| ((row - first) as u32, source * width..(source + 1) * width));
    let (rows, values) = values.summed(ranges);
    Gradient::Rows { rows, values }
}

#[cfg(test)]
mod tests {
    use std::iter::zip;

    use gradring_proto::parameters::optimizer::Sgd;

    use super::*;

    fn model(servers: usize) -> Model {
        let variable = |name: &str, shape: &[usize]| Variable {
            name: name.into(),
            shape: shape.into(),
            float_type: FloatType::F32,
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
            let payloads = model.initial(&[(&table[..]).into(), FloatSlice::F32(&[99.0])]);
            let pulled = payloads.iter().map(|payload| match &**payload {
                Payload::Initial { parts, .. } => {
                    let weights = parts.iter().map(|(_, weights)| weights.clone());
                    (Default::default(), weights.collect())
                }
                Payload::Gradients(_) => panic!("not initial"),
            });
            let pulled: Vec<Pulled> = pulled.collect();
            let other = Arc::new(self::model(servers + 1));
            assert!(PulledModel::new(other, pulled.clone(), vec![]).is_none());
            let pulled = PulledModel::new(Arc::new(model), pulled, vec![]).unwrap();
            let (mut first, mut second) = ([0.0_f32; 14], [0.0_f32; 1]);
            pulled.put(0, first.bytes_mut());
            pulled.put(1, second.bytes_mut());
            assert_eq!((&first[..], second), (&table[..], [99.0]));
            assert_eq!(pulled.first(0, 5), table[..5].to_vec().into());
            assert_eq!(pulled.first(1, 5), vec![99.0].into());
            let changed = pulled.changed(0);
            assert_eq!(
                changed.iter().map(ExactSizeIterator::len).sum::<usize>(),
                14
            );
        }
    }

    #[test]
    fn changed_ranges_are_those_of_the_variable_in_all_parts() {
        let model = Arc::new(model(2));
        let mut pulled = Vec::new();
        let mut changed = Vec::new();
        for parts in &model.shards {
            let weights = parts.iter().map(|part| {
                let weights = part.elements.clone().map(|it| it as f32);
                Arc::new(weights.collect::<Vec<f32>>().into())
            });
            pulled.push((Default::default(), weights.collect()));
            // All of the second part of the table has changed.
            let rows = |part: &VariablePart| (part.elements.start == 0).then(|| vec![0, 2]);
            changed.push(parts.iter().map(rows).collect());
        }
        // The larger part, which is the second, is on the first server.
        let (server, index) = model.places[0][0];
        let end = model.shards[server][index].elements.start;
        let pulled = PulledModel::new(Arc::clone(&model), pulled, changed).unwrap();
        assert_eq!(pulled.changed(0), [end..14, 0..2, 4..6]);
        let mut all = [0.0_f32; 14];
        pulled.put(0, all.bytes_mut());
        for range in [0..14, 4..6, end - 1..end + 1, end..14] {
            let mut some = [-1.0_f32; 14];
            pulled.put_range(0, &range, some.bytes_mut());
            for (index, value) in some.into_iter().enumerate() {
                let expected = if range.contains(&index) {
                    all[index]
                } else {
                    -1.0
                };
                assert_eq!(value, expected, "{index} of {range:?}");
            }
        }
    }

    #[test]
    fn rows_go_to_the_server_of_their_part_in_order_and_repeated_ones_add_up() {
        let model = model(2);
        let values = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        let given = Given::Rows(&[6, 0, 6], FloatSlice::F32(&values));
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
                for (row, values) in zip(rows, values.of::<f32>().chunks(2)) {
                    found.insert(part.elements.start / 2 + *row as usize, values.to_vec());
                }
            }
        }
        assert_eq!(
            found,
            [(0, vec![10.0, 20.0]), (6, vec![101.0, 202.0])].into()
        );
    }

    #[test]
    fn models_differ_by_the_element_types_of_their_variables() {
        let model = |float_type| {
            let variable = Variable {
                name: "table".into(),
                shape: vec![5, 2],
                float_type,
                decays: true,
            };
            let optimizer = super::tests::model(1).optimizer;
            Model::new(vec![variable], optimizer, &BTreeMap::new(), 1)
        };
        for float_type in FloatType::ALL {
            let wide = model(FloatType::F64);
            let is_same = float_type == FloatType::F64;
            assert_eq!(
                model(float_type).fingerprint() == wide.fingerprint(),
                is_same
            );
            let weights = vec![Arc::new(Floats::repeated(float_type, 1.0, 10))];
            let pulled = vec![(Default::default(), weights)];
            assert_eq!(
                PulledModel::new(Arc::new(wide), pulled, vec![]).is_some(),
                is_same
            );
            let bytes = 10 * float_type.size_bytes();
            assert_eq!(model(float_type).bytes_on(0), bytes as u64);
        }
    }
}
