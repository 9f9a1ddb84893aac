//! Faults that messages trigger, or the time.

use std::collections::BTreeMap;

use super::time::Moment;

/// When a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger<Kind> {
    At(Moment),
    /// Right after so many messages of a kind by anybody.
    Message {
        kind: Kind,
        number: u64,
        hits: Hits,
    },
}

/// Whom a fault hits that a message triggers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hits {
    /// When it has sent the message.
    Sender,
    /// While the message is on its way.
    Receiver,
    /// When it has answered the message.
    Answerer,
}

#[derive(Debug, Clone)]
pub(crate) struct Fault<Kind, Who, Harm> {
    pub(crate) trigger: Trigger<Kind>,
    /// Whom it hits, if the trigger does not say.
    pub(crate) who: Who,
    pub(crate) harm: Harm,
}

/// Faults of a history, and which of them have struck.
pub(crate) struct Faults<Kind, Who, Harm> {
    all: Vec<Fault<Kind, Who, Harm>>,
    struck: Vec<Option<Who>>,
    /// Messages so far.
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

    /// Those that strike at a time: which, when, and whom.
    pub(crate) fn timed(&self) -> Vec<(usize, Moment, Who)> {
        let faults = self.all.iter().enumerate();
        let timed = faults.filter_map(|(index, fault)| match fault.trigger {
            Trigger::At(at) => Some((index, at, fault.who)),
            Trigger::Message { .. } => None,
        });
        timed.collect()
    }

    /// Those that strike now that there is one more message of this kind.
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

    /// Notes that a fault strikes; nothing if it has struck before.
    pub(crate) fn strike(&mut self, index: usize, who: Who) -> Option<Fault<Kind, Who, Harm>> {
        if self.struck[index].is_some() {
            return None;
        }
        self.struck[index] = Some(who);
        Some(self.all[index].clone())
    }

    /// Those that have struck, and whom they hit.
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
