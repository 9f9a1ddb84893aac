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
        let is_first = self.struck[index].replace(who).is_none();
        is_first.then(|| self.all[index].clone())
    }

    /// Those that have struck, and whom they hit.
    pub(crate) fn struck(&self) -> impl Iterator<Item = (&Fault<Kind, Who, Harm>, Who)> {
        let faults = self.all.iter().zip(&self.struck);
        faults.filter_map(|(fault, struck)| Some((fault, (*struck)?)))
    }
}
