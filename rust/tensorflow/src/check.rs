//! The search for gradients that are not finite, on the rank that has computed them.
//!
//! After a reduction all ranks have the same NaN, and its origin is lost. So a Start with the
//! attribute `check` reads its tensors before it hands them to the engine; they are probably still
//! in cache then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gradring_core::communicator::Communicator;
use gradring_proto::dtype::DType;
use gradring_proto::kernel;
use gradring_proto::lock::lock;

use crate::context::Construction;
use crate::ops::attr;
use crate::shared_by_nodes::WeakMap;
use crate::status::{Code, Failure};
use crate::tensor::Tensor;

/// Shortest time between two log lines about one communicator, because a training that has gone
/// wrong finds NaNs in every step.
const QUIET: Duration = Duration::from_secs(60);
/// Largest number of variables named in one message.
const NAMED_MAX: usize = 3;

/// Check of a Start's gradients for values that are not finite.
pub(crate) struct Check {
    action: Action,
    /// Names of the tensors' variables, in order.
    variables: Vec<String>,
    /// Number of times that any node of any graph has started these gradients.
    steps: Arc<AtomicU64>,
    limit: Arc<Mutex<LogLimit>>,
}

/// Steps, by number of the communicator and names of the variables.
static STEPS: WeakMap<(i64, String), AtomicU64> = WeakMap::new();
/// Log limits, by number of the communicator.
static LIMITS: WeakMap<i64, Mutex<LogLimit>> = WeakMap::new();

#[derive(Clone, Copy)]
enum Action {
    Warn,
    Raise,
}

/// Limit for log lines about one communicator: time of the last line, and number of findings since.
#[derive(Default)]
struct LogLimit {
    at: Option<Instant>,
    swallowed: u64,
}

impl Check {
    /// Reads the check from a node's attributes; `None` if it has none.
    pub(crate) fn of(node: &Construction) -> Result<Option<Self>, Failure> {
        let action = match node.string(attr::CHECK)?.as_str() {
            "" => return Ok(None),
            "warn" => Action::Warn,
            "raise" => Action::Raise,
            other => {
                let text = format!("check='{other}' is neither 'warn' nor 'raise'");
                return Err(Failure::new(Code::InvalidArgument, text));
            }
        };
        let variables = node.string(attr::VARIABLES)?;
        let communicator = node.int(attr::COMMUNICATOR)?;
        Ok(Some(Self {
            action,
            variables: variables.lines().map(str::to_owned).collect(),
            steps: STEPS.of((communicator, variables)),
            limit: LIMITS.of(communicator),
        }))
    }

    /// Checks tensors that are about to be started. Logs a warning or aborts the group if it finds
    /// something.
    pub(crate) fn examine(&self, communicator: &Communicator, dtype: DType, tensors: &[Tensor]) {
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let found: Vec<(usize, Found)> = tensors
            .iter()
            .enumerate()
            .filter_map(|(index, tensor)| Some((index, Found::in_tensor(tensor, dtype)?)))
            .collect();
        if found.is_empty() {
            return;
        }
        let text = format!("{} at step {step}", self.describe(&found));
        match self.action {
            Action::Raise => communicator.abort(&text),
            Action::Warn => {
                let mut limit = lock(&self.limit);
                if let Some(more) = limit.now(Instant::now()) {
                    communicator.log_line(&format!("{text}{more}"));
                }
            }
        }
    }

    fn describe(&self, found: &[(usize, Found)]) -> String {
        let named: Vec<String> = found
            .iter()
            .take(NAMED_MAX)
            .map(|(index, found)| {
                let variable = self.variables.get(*index).map_or("?", String::as_str);
                format!("gradient of '{variable}' has {found}")
            })
            .collect();
        let others = found.len() - named.len();
        let more = match others {
            0 => String::new(),
            1 => ", and that of 1 more variable".into(),
            _ => format!(", and those of {others} more variables"),
        };
        named.join(", ") + &more
    }
}

impl LogLimit {
    /// Returns the text to append to a line now; `None` if no line is due.
    fn now(&mut self, now: Instant) -> Option<String> {
        if self.at.is_some_and(|at| now < at + QUIET) {
            self.swallowed += 1;
            return None;
        }
        self.at = Some(now);
        match std::mem::take(&mut self.swallowed) {
            0 => Some(String::new()),
            swallowed => Some(format!(
                " ({swallowed} more findings since the last such line)"
            )),
        }
    }
}

/// Number of values in one tensor that are not finite, and number of all.
struct Found {
    count: usize,
    of: usize,
}

impl Found {
    fn in_tensor(tensor: &Tensor, dtype: DType) -> Option<Self> {
        let slice = tensor.slice(dtype)?;
        // SAFETY: the slice is the tensor's memory, which this op alone uses.
        let count = unsafe { kernel::non_finite(dtype, slice.start, slice.count) };
        (count > 0).then_some(Self {
            count,
            of: slice.count,
        })
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let values = if self.count == 1 { "value" } else { "values" };
        write!(f, "{} non-finite {values} of {}", self.count, self.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[&str]) -> Check {
        Check {
            action: Action::Warn,
            variables: variables.iter().map(|&name| name.to_owned()).collect(),
            steps: Arc::default(),
            limit: Arc::default(),
        }
    }

    #[test]
    fn a_description_names_the_first_variables_and_counts_the_others() {
        let check = check(&["a", "b", "c", "d", "e"]);
        let found = |index, count| (index, Found { count, of: 10 });
        assert_eq!(
            check.describe(&[found(1, 3)]),
            "gradient of 'b' has 3 non-finite values of 10"
        );
        let all: Vec<_> = (0..5).map(|index| found(index, 1)).collect();
        let text = check.describe(&all);
        assert!(text.starts_with("gradient of 'a' has 1 non-finite value of 10, gradient of 'b'"));
        assert!(text.ends_with(", and those of 2 more variables"));
        assert!(
            check
                .describe(&all[..4])
                .ends_with(", and that of 1 more variable")
        );
    }

    #[test]
    fn after_a_line_findings_are_counted_for_a_while() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        assert_eq!(limit.now(start), Some(String::new()));
        assert_eq!(limit.now(start), None);
        assert_eq!(limit.now(start + QUIET / 2), None);
        let next = limit.now(start + QUIET).unwrap();
        assert_eq!(next, " (2 more findings since the last such line)");
        assert_eq!(limit.now(start + QUIET), None);
    }
}
