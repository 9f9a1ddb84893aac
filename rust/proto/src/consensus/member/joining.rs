//! A process outside of the job that wants to join.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{KNOWN_MAX, Member, MemberPhase};
use crate::consensus::message::{Envelope, MemberRequest, Outcome, Reply, Step};
use crate::error::NotAgreed;

/// State of a process that wants to join.
pub(super) struct Joining {
    /// Time of the next request by address; `None` while a request is on its way.
    pub(super) asked: BTreeMap<String, Option<Instant>>,
    /// Reasons for which processes have refused this one, by address.
    pub(super) turned_away: BTreeMap<String, String>,
    /// Time of a member's last reply.
    pub(super) noted: Instant,
    /// True once a member has replied, or if this process was a member before.
    pub(super) is_known: bool,
    /// Addresses at which nothing listened at the last request.
    pub(super) refused: BTreeSet<String>,
}

impl Member {
    pub(super) fn step_joining(&mut self, now: Instant) -> Step {
        let MemberPhase::Joining(joining) = &mut self.phase else {
            unreachable!("asked while it joins only");
        };
        let limit = joining.noted + self.timing.join;
        let is_told_by_all = joining.turned_away.len() == joining.asked.len();
        if !joining.turned_away.is_empty() && (is_told_by_all || now >= limit) {
            let refusals = joining.turned_away.iter();
            let refusals = refusals.map(|(address, why)| format!("{address}: {why}").into());
            let refusals = refusals.collect();
            return self.fail(NotAgreed::TurnedAway { refusals });
        }
        // The job has ended.
        let is_over = joining.is_known && joining.refused.len() == joining.asked.len();
        if now >= limit || is_over {
            let asked = joining.asked.keys().map(|it| (**it).into()).collect();
            let within = now.saturating_duration_since(joining.noted);
            return self.fail(NotAgreed::NobodyToJoin { asked, within });
        }
        for (address, due) in &mut joining.asked {
            if due.is_some_and(|due| due <= now) {
                *due = None;
                let envelope = Envelope {
                    from: self.me.clone(),
                    to: None,
                    request: MemberRequest::Join,
                };
                return Step::Send(address.clone(), envelope);
            }
        }
        let next = joining.asked.values().flatten().copied().min();
        Step::Wait(Some(next.map_or(limit, |next| next.min(limit))))
    }

    pub(super) fn on_joining_outcome(&mut self, address: &str, outcome: &Outcome, now: Instant) {
        let MemberPhase::Joining(joining) = &mut self.phase else {
            return;
        };
        let again = now + self.timing.remind;
        joining.asked.insert(address.to_owned(), Some(again));
        match outcome {
            Outcome::Refused => joining.refused.insert(address.to_owned()),
            _ => joining.refused.remove(address),
        };
        match outcome {
            Outcome::TurnedAway(why) => joining.turned_away.insert(address.to_owned(), why.clone()),
            _ => joining.turned_away.remove(address),
        };
        if let Outcome::Reply(Reply::Noted(members)) = outcome
            && !members.is_empty()
        {
            joining.noted = now;
            joining.is_known = true;
            for member in members.iter().filter(|member| member.id != self.me.id) {
                if joining.asked.len() < KNOWN_MAX {
                    let asked = joining.asked.entry(member.address.clone());
                    asked.or_insert(Some(now));
                }
            }
        }
    }
}
