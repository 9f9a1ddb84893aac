//! Faults, triggered by messages or by time.

use std::collections::BTreeMap;

use super::time::Moment;

/// Moment at which a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger<Kind> {
    At(Moment),
    /// Right after the message of this number and kind, from any process.
    Message {
        kind: Kind,
        number: u64,
        hits: Hits,
    },
}

/// Process that is hit by a fault that a message triggers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hits {
    /// The sender, after it has sent the message.
    Sender,
    /// The receiver, while the message is on its way.
    Receiver,
    /// The receiver, after it has answered the message.
    Answerer,
}

#[derive(Debug, Clone)]
pub(crate) struct Fault<Kind, Who, Harm> {
    pub(crate) trigger: Trigger<Kind>,
    /// Process that is hit if the trigger does not decide it.
    pub(crate) who: Who,
    pub(crate) harm: Harm,
}

/// Faults of a history, and the processes that they have hit.
pub(crate) struct Faults<Kind, Who, Harm> {
    all: Vec<Fault<Kind, Who, Harm>>,
    struck: Vec<Option<Who>>,
    /// Number of messages so far, by kind.
    counts: BTreeMap<(Kind, Hits), u64>,
}

impl<Kind: Copy + Ord, Who: Copy, Harm: Clone> Faults<Kind, Who, Harm> {
    pub(crate) fn new(all: Vec<Fault<Kind, Who, Harm>>) -> Self {
        Self {
            struck: vec![None; all.len()],
            all,
            counts: BTreeMap::new(),
        }
    }

    /// Faults triggered by time: position, moment and process.
    pub(crate) fn timed(&self) -> Vec<(usize, Moment, Who)> {
        let faults = self.all.iter().enumerate();
        let timed = faults.filter_map(|(index, fault)| match fault.trigger {
            Trigger::At(at) => Some((index, at, fault.who)),
            Trigger::Message { .. } => None,
        });
        timed.collect()
    }

    /// Counts a message of this kind, and returns the faults that it triggers.
    pub(crate) fn count(&mut self, kind: Kind, hits: Hits) -> Vec<usize> {
        let count = self.counts.entry((kind, hits)).or_default();
        *count += 1;
        let number = *count;
        let due = Trigger::Message { kind, number, hits };
        let indices = 0..self.all.len();
        indices
            .filter(|&index| self.struck[index].is_none() && self.all[index].trigger == due)
            .collect()
    }

    /// Records that a fault strikes; `None` if it has struck before.
    pub(crate) fn strike(&mut self, index: usize, who: Who) -> Option<Fault<Kind, Who, Harm>> {
        if self.struck[index].is_some() {
            return None;
        }
        self.struck[index] = Some(who);
        Some(self.all[index].clone())
    }

    /// Faults that have struck, each with the process that it hit.
    pub(crate) fn struck(&self) -> impl Iterator<Item = (&Fault<Kind, Who, Harm>, Who)> {
        let faults = self.all.iter().zip(&self.struck);
        faults.filter_map(|(fault, struck)| Some((fault, (*struck)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_once_at_the_message_that_it_waits_for() {
        let message = |hits| Fault {
            trigger: Trigger::Message {
                kind: 'a',
                number: 2,
                hits,
            },
            who: 0,
            harm: hits,
        };
        let timed = Fault {
            trigger: Trigger::At(9),
            who: 5,
            harm: Hits::Receiver,
        };
        let all = vec![message(Hits::Sender), message(Hits::Answerer), timed];
        let mut faults = Faults::new(all);
        assert_eq!(faults.timed(), [(2, 9, 5)]);
        assert!(faults.count('a', Hits::Sender).is_empty());
        assert!(faults.count('b', Hits::Sender).is_empty());
        assert!(faults.count('a', Hits::Answerer).is_empty());
        assert_eq!(faults.count('a', Hits::Sender), [0]);
        let struck = faults.strike(0, 3).map(|fault| fault.harm);
        assert_eq!(struck, Some(Hits::Sender));
        assert!(faults.strike(0, 4).is_none());
        assert_eq!(faults.struck().map(|(_, who)| who).collect::<Vec<_>>(), [3]);
    }
}
