//! The error behind the message of a failed op.
//!
//! TensorFlow carries a failure as a code and a message, and adds words of its own before and
//! after the message. So the errors behind the last messages are remembered here.

use std::collections::VecDeque;
use std::sync::Mutex;

use gradring_proto::error::Error;
use gradring_proto::lock::lock;

/// Number of errors remembered: more than the buckets of a step that fail together.
const CAPACITY: usize = 256;

static REMEMBERED: Mutex<VecDeque<Error>> = Mutex::new(VecDeque::new());

/// Returns the newest error whose text is part of `message`.
#[must_use]
pub fn find(message: &str) -> Option<Error> {
    let remembered = lock(&REMEMBERED);
    let mut newest_first = remembered.iter().rev();
    newest_first
        .find(|error| message.contains(&words(error)))
        .cloned()
}

/// Returns the message of an op that failed by `error`.
pub(crate) fn text(error: &Error) -> String {
    format!("gradring {}", words(error))
}

/// Returns the part that every message about `error` contains: the name of its Python exception,
/// and its text. Python code inside an op, such as a generator of data, raises it with the same
/// part.
fn words(error: &Error) -> String {
    format!("{}: {error}", error.kind.exception()).replace('\0', " ")
}

/// Remembers an error whose message may reach Python through TensorFlow.
pub fn remember(error: &Error) {
    let mut remembered = lock(&REMEMBERED);
    if remembered.len() == CAPACITY {
        remembered.pop_front();
    }
    remembered.push_back(error.clone());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_found_by_its_words_within_others() {
        let error = Error::aborted("why").during("all_reduce 'w'", 7);
        remember(&error);
        remember(&Error::aborted("something else"));
        let message = format!("Graph execution error: {} [Op:x]", text(&error));
        assert_eq!(find(&message), Some(error));
        assert_eq!(find("gradring PeerLostError: another"), None);
    }
}
