//! Decoder of consensus messages about the members of the next group.

use std::time::Instant;

use super::{decode_alone, script};
use gradring_proto::consensus::member::Member;
use gradring_proto::consensus::message::{
    AcceptedView, Envelope, MemberRequest, News, Outcome, Reply, Step,
};
use gradring_proto::consensus::quorum::{Ballot, Id, Peer, Roster};
use gradring_proto::consensus::timing::Timing;
use gradring_proto::wire::handshake;

/// A decoded message can be encoded again, and no receiver panics: neither a member whose group
/// connects, nor one whose group has failed, nor one that joins.
pub fn consensus(bytes: &[u8]) {
    decode_alone(bytes, |mut bytes| {
        handshake::read_message::<Envelope>(&mut bytes)
    });
    decode_alone(bytes, |mut bytes| {
        handshake::read_message::<Reply>(&mut bytes)
    });
    let now = Instant::now();
    if let Ok(envelope) = handshake::read_message::<Envelope>(&mut &*bytes) {
        for mut member in members(now) {
            let reply = member.answer(&envelope, now);
            handshake::write_message(&mut Vec::new(), &reply).expect("answers can be written");
            do_steps(&mut member, now);
        }
    }
    if let Ok(reply) = handshake::read_message::<Reply>(&mut &*bytes) {
        for mut member in members(now) {
            do_steps(&mut member, now);
            let outcome = Outcome::Reply(reply.clone());
            for to in [Some(id(2)), Some(id(9)), None] {
                member.on_outcome("node-2:1", to, &outcome, now);
            }
            do_steps(&mut member, now);
        }
    }
}

/// A member that connects, one whose group has failed and that proposes, and one that joins.
fn members(now: Instant) -> [Member; 3] {
    let connects = || Member::founding(peer(1), founders(), Timing::default(), 1..=4);
    let mut reforms = connects();
    reforms.connected();
    reforms.reform(&[id(3)], now);
    let addresses = ["node-2:1".to_owned()];
    let joins = Member::joining(peer(1), addresses, Timing::default(), 1..=4, now);
    [connects(), reforms, joins]
}

fn do_steps(member: &mut Member, now: Instant) {
    for _ in 0..8 {
        if matches!(member.step(now), Step::Wait(_)) {
            return;
        }
    }
}

pub(super) fn samples() -> Vec<Vec<u8>> {
    let base = AcceptedView {
        roster: founders(),
        is_established: true,
    };
    let news = || News {
        dead: vec![id(3)],
        joiners: vec![peer(4)],
        unreached: vec!["node-3:1".into()],
    };
    let ballot = Ballot {
        round: 2,
        proposer: id(2),
    };
    let requests = [
        MemberRequest::Gather {
            ballot,
            base: base.clone(),
            news: news(),
        },
        MemberRequest::Install(founders()),
        MemberRequest::Watch(founders().ballot),
        MemberRequest::Join,
        MemberRequest::Leave,
        MemberRequest::Finish(founders().ballot),
    ];
    let own = Ballot {
        round: 2,
        proposer: id(1),
    };
    let promise = |view| Reply::Promise {
        ballot: own,
        view,
        news: news(),
    };
    let replies = [
        promise(Some(base.clone())),
        promise(None),
        Reply::Busy,
        Reply::Behind(ballot),
        Reply::Elsewhere(base),
        Reply::Accepted(founders().ballot),
        Reply::Noted(vec![peer(2), peer(3)]),
        Reply::OtherProcess,
    ];
    let asked = requests.into_iter().map(|request| Envelope {
        from: peer(2),
        to: (request != MemberRequest::Join).then_some(id(1)),
        request,
    });
    let asked = asked.map(|envelope| script(&[envelope]));
    let answered = replies.iter().map(|reply| script(&[reply]));
    asked.chain(answered).collect()
}

fn founders() -> Roster {
    Roster::founding(vec![peer(1), peer(2), peer(3)])
}

const fn id(number: u8) -> Id {
    Id([number; 16])
}

fn peer(number: u8) -> Peer {
    Peer {
        id: id(number),
        address: format!("node-{number}:1"),
    }
}
