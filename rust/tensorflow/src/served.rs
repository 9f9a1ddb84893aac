//! Kernels of the ops that exchange with parameter servers.
//!
//! `GradringPushOpen` begins a push, and checks the variables. `GradringPushPiece` copies some
//! gradients to the worker's thread, which sends them. `GradringPush` ends the push, and
//! `GradringPull` waits for the weights. None of them runs Python.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use gradring_proto::lock::lock;
use gradring_proto::parameters::floats::FloatSlice;
use gradring_proto::parameters::optimizer::Hyper;
use gradring_servers::model::{Given, Variable};
use gradring_servers::worker::{PushHandle, Worker};

use crate::context::{Construction, Context};
use crate::interrupts;
use crate::kernel::Kernel;
use crate::ops::attr;
use crate::status::{Code, Failure};
use crate::tensor::Tensor;
use crate::values::{Copies, Values};

/// Form of a variable's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Missing,
    Dense,
    Rows,
}

/// Number of a worker of servers in this process.
struct WorkerId(u64);

impl WorkerId {
    fn of(node: &Construction) -> Result<Self, Failure> {
        let id = node.int(attr::CLIENT)?;
        u64::try_from(id)
            .map(Self)
            .map_err(|_| Failure::new(Code::InvalidArgument, format!("{id} is no client")))
    }

    fn open(&self) -> Result<Arc<Worker>, Failure> {
        Ok(Worker::by_id(self.0)?)
    }
}

/// Begins a push.
pub(crate) struct PushOpen {
    client: WorkerId,
    pieces: usize,
}

impl Kernel for PushOpen {
    fn create(node: &Construction) -> Result<Self, Failure> {
        Ok(Self {
            client: WorkerId::of(node)?,
            pieces: size(node, attr::PIECES)?,
        })
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let worker = self.client.open()?;
        // Input 0 is the token.
        let mut inputs = Inputs { context, next: 1 };
        let found = inputs.take(context.num_inputs() as usize - 1)?;
        worker.check_unset(&all_floats(&found)?)?;
        let PushHandle(handle) = worker.open_push(self.pieces)?;
        context.set_output(0, &Tensor::scalar(context.api(), handle as i64)?)
    }
}

/// Hands over the gradients of some variables.
pub(crate) struct PushPiece {
    client: WorkerId,
    piece: usize,
    /// Form of each variable's gradient in this piece.
    forms: Vec<Form>,
}

impl Kernel for PushPiece {
    fn create(node: &Construction) -> Result<Self, Failure> {
        let form = |letter| match letter {
            'd' => Ok(Form::Dense),
            'r' => Ok(Form::Rows),
            '-' => Ok(Form::Missing),
            _ => Err(Failure::new(
                Code::InvalidArgument,
                format!("{letter:?} is no form of a gradient"),
            )),
        };
        Ok(Self {
            client: WorkerId::of(node)?,
            piece: size(node, attr::PIECE)?,
            forms: node
                .string(attr::FORMS)?
                .chars()
                .map(form)
                .collect::<Result<_, _>>()?,
        })
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let worker = self.client.open()?;
        // Input 0 is the token.
        let mut inputs = Inputs { context, next: 1 };
        let handle = inputs.scalar()?;
        let variables = self.forms.len();
        let count = |form| self.forms.iter().filter(|it| **it == form).count();
        let (dense, rows) = (count(Form::Dense), count(Form::Rows));
        let dense = inputs.take(dense)?;
        let (indices, values) = (inputs.take(rows)?, inputs.take(rows)?);
        let model = worker.begun()?;
        if model.variables().len() != variables {
            let text = format!(
                "{variables} gradients for {} variables",
                model.variables().len()
            );
            return Err(Failure::new(Code::InvalidArgument, text));
        }
        let numbers = indices
            .iter()
            .map(Tensor::read_i64)
            .collect::<Result<Vec<_>, _>>()?;
        let numbers: Vec<Vec<usize>> = numbers
            .into_iter()
            .map(|rows| rows.into_iter().map(|row| row as usize).collect())
            .collect();
        let (dense, values) = (all_floats(&dense)?, all_floats(&values)?);
        let (mut dense, mut rows) = (dense.into_iter(), numbers.iter().zip(values));
        let mut given = Vec::with_capacity(variables);
        for (form, variable) in self.forms.iter().zip(model.variables()) {
            let gradient = match form {
                Form::Missing => None,
                Form::Dense => dense.next().map(Given::Dense),
                Form::Rows => rows.next().map(|(rows, values)| Given::Rows(rows, values)),
            };
            if let Some(gradient) = &gradient {
                check("the gradient", gradient, variable)?;
            }
            given.push(gradient);
        }
        worker.put_gradients(PushHandle(handle as u64), self.piece, &given)?;
        context.set_output(0, &Tensor::scalar(context.api(), handle)?)
    }
}

/// Ends a push.
pub(crate) struct Push(WorkerId);

impl Kernel for Push {
    fn create(node: &Construction) -> Result<Self, Failure> {
        WorkerId::of(node).map(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let worker = self.0.open()?;
        // Input 0 is the token.
        let mut inputs = Inputs { context, next: 1 };
        let (rate, decay) = (inputs.take(1)?, inputs.take(1)?);
        // All pieces return the handle of the push.
        let handle = inputs.scalar()?;
        let first = |tensors: &[Tensor]| match all_floats(tensors)?[..] {
            [FloatSlice::F64([value, ..])] => Ok(*value),
            _ => Err(Failure::new(Code::InvalidArgument, "a rate has no value")),
        };
        let hyper = Hyper {
            learning_rate: first(&rate)?,
            weight_decay: first(&decay)?,
        };
        // `stats` tells later how many gradients counted.
        let counts = worker.close_push(PushHandle(handle as u64), hyper)?;
        let handle = Tensor::scalar(context.api(), i64::from(counts))?;
        context.set_output(0, &handle)
    }
}

/// Pulls the variables.
pub(crate) struct Pull(WorkerId);

impl Kernel for Pull {
    fn create(node: &Construction) -> Result<Self, Failure> {
        WorkerId::of(node).map(Self)
    }

    fn compute(&self, context: &Context) -> Result<(), Failure> {
        let worker = self.0.open()?;
        // Input 0 is the handle of the push, which orders the two.
        let mut inputs = Inputs { context, next: 1 };
        let present = inputs.take(context.num_inputs() as usize - 1)?;
        let pulled = loop {
            if let Some(pulled) = worker.pull_model(&mut interrupts::outstanding)? {
                break pulled;
            }
            // Servers that have lost their values request initial ones again.
            let model = worker.begun()?;
            let values = all_floats(&present)?;
            check_initial(&values, model.variables())?;
            worker.push_initial(&values)?;
        };
        let mut kept = lock(&worker.for_ops);
        let kept = kept.get_or_insert_with(|| Box::new(Copies::<Tensor>::NONE));
        let Some(copies) = kept.downcast_mut::<Copies<Tensor>>() else {
            return Err(Failure::new(Code::Internal, "another op keeps memory"));
        };
        let share = |variable: usize, values: &Arc<Values>| {
            let Variable {
                shape, float_type, ..
            } = &pulled.variables()[variable];
            let dims: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            Tensor::shared(context.api(), *float_type, &dims, values)
        };
        for (output, tensor) in (0..).zip(copies.filled(&pulled, share)?) {
            context.set_output(output, tensor)?;
        }
        Ok(())
    }
}

/// The inputs of an op, one after another.
struct Inputs<'a> {
    context: &'a Context,
    next: c_int,
}

impl Inputs<'_> {
    fn take(&mut self, count: usize) -> Result<Vec<Tensor>, Failure> {
        let taken = (self.next..)
            .take(count)
            .map(|index| self.context.input(index));
        let taken = taken.collect::<Result<Vec<_>, _>>()?;
        self.next += count as c_int;
        Ok(taken)
    }

    fn scalar(&mut self) -> Result<i64, Failure> {
        let values = self.take(1)?[0].read_i64()?;
        let value = values.first().copied();
        value.ok_or_else(|| Failure::new(Code::InvalidArgument, "a handle has no value"))
    }
}

fn size(node: &Construction, name: &CStr) -> Result<usize, Failure> {
    let value = node.int(name)?;
    usize::try_from(value)
        .map_err(|_| Failure::new(Code::InvalidArgument, format!("{value} is no size")))
}

fn all_floats(tensors: &[Tensor]) -> Result<Vec<FloatSlice<'_>>, Failure> {
    tensors.iter().map(Tensor::floats).collect()
}

/// Checks that each variable has an initial value that fits it.
fn check_initial(values: &[FloatSlice<'_>], variables: &[Variable]) -> Result<(), Failure> {
    if values.len() != variables.len() {
        let (given, wanted) = (values.len(), variables.len());
        let text = format!("a pull has {given} present values for {wanted} variables");
        return Err(Failure::new(Code::InvalidArgument, text));
    }
    let mut pairs = values.iter().zip(variables);
    pairs.try_for_each(|(values, variable)| {
        check("the initial value", &Given::Dense(*values), variable)
    })
}

/// Checks that a gradient or value fits its variable. Messages call it `what`.
fn check(what: &str, given: &Given<'_>, variable: &Variable) -> Result<(), Failure> {
    let rows = variable.shape.first().copied().unwrap_or(1);
    let width: usize = variable.shape.iter().skip(1).product();
    let (Given::Dense(values) | Given::Rows(_, values)) = given;
    let (there, wanted) = (values.float_type(), variable.float_type);
    let problem = match given {
        _ if there != wanted => format!("is {} for one of {}", there.name(), wanted.name()),
        Given::Dense(values) if values.len() != rows * width => {
            format!("has {} values", values.len())
        }
        Given::Rows(indices, values) if values.len() != indices.len() * width => {
            format!("has {} values for {} rows", values.len(), indices.len())
        }
        Given::Rows(indices, _) => match indices.iter().find(|row| **row >= rows) {
            Some(row) => format!("has the row {}, which does not exist", *row as i64),
            None => return Ok(()),
        },
        Given::Dense(_) => return Ok(()),
    };
    let (name, shape) = (&variable.name, &variable.shape);
    let text = format!("{what} of {name}, of shape {shape:?}, {problem}");
    Err(Failure::new(Code::InvalidArgument, text))
}

#[cfg(test)]
mod tests {
    use gradring_proto::parameters::float::FloatType;

    use super::*;

    #[test]
    fn gradients_of_other_shapes_are_refused_by_the_name_of_the_variable() {
        let variable = |shape: &[usize]| Variable {
            name: "table".into(),
            shape: shape.into(),
            float_type: FloatType::F32,
            decays: false,
        };
        let refused = |given: Given<'_>, shape: &[usize]| {
            let failure = check("the gradient", &given, &variable(shape)).err()?;
            Some(failure.message().to_owned())
        };
        let dense = |values| Given::Dense(FloatSlice::F32(values));
        let rows = |rows, values| Given::Rows(rows, FloatSlice::F32(values));
        assert_eq!(refused(dense(&[0.0; 6]), &[3, 2]), None);
        assert_eq!(refused(dense(&[0.0]), &[]), None);
        assert_eq!(refused(rows(&[2, 0], &[0.0; 4]), &[3, 2]), None);
        for (given, problem) in [
            (dense(&[0.0; 5]), "has 5 values"),
            (rows(&[0], &[0.0; 4]), "has 4 values for 1 rows"),
            (rows(&[3], &[0.0; 2]), "has the row 3"),
            (rows(&[-1_i64 as usize], &[0.0; 2]), "has the row -1"),
            (
                Given::Dense(FloatSlice::F64(&[0.0; 6])),
                "is float64 for one of float32",
            ),
        ] {
            let text = refused(given, &[3, 2]).unwrap();
            assert!(text.contains("table") && text.contains(problem), "{text}");
        }
    }

    #[test]
    fn initial_values_must_fit_all_variables() {
        let variables = [Variable {
            name: "table".into(),
            shape: [2].into(),
            float_type: FloatType::F32,
            decays: false,
        }];
        let refused = |values: &[FloatSlice<'_>]| {
            let failure = check_initial(values, &variables).err()?;
            Some(failure.message().to_owned())
        };
        assert_eq!(refused(&[FloatSlice::F32(&[0.0; 2])]), None);
        for (values, problem) in [
            (&[][..], "0 present values for 1 variables"),
            (&[FloatSlice::F32(&[0.0; 3])], "the initial value of table"),
            (
                &[FloatSlice::F64(&[0.0; 2])],
                "is float64 for one of float32",
            ),
        ] {
            let text = refused(values).unwrap();
            assert!(text.contains(problem), "{text}");
        }
    }
}
