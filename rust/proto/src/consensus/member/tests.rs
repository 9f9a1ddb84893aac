use super::*;
use crate::consensus::message::{News, Outcome, Reply};
use crate::error::ErrorKind;

const NONE: [Id; 0] = [];

fn peer(number: u8) -> Peer {
    Peer {
        id: Id([number; 16]),
        address: format!("h{number}:1"),
    }
}

/// Connected members of one group, on a network without delays.
struct Job {
    members: Vec<Member>,
    now: Instant,
    errors: Vec<String>,
    /// Processes whose addresses refuse, and that give no answer.
    dead: Vec<u8>,
    silent: Vec<u8>,
}

impl Job {
    fn new(size: u8) -> Self {
        let roster = Roster::founding((1..=size).map(peer).collect());
        let founding = |number| {
            let timing = Timing::default();
            let mut member = Member::founding(peer(number), roster.clone(), timing, 1..=8);
            assert!(matches!(member.step(Instant::now()), Step::Connect(_)));
            member.connected();
            member
        };
        Self {
            members: (1..=size).map(founding).collect(),
            now: Instant::now(),
            errors: Vec::new(),
            dead: Vec::new(),
            silent: Vec::new(),
        }
    }

    fn carry(&mut self, address: &str, envelope: &Envelope) -> Outcome {
        let number = address[1..2].parse::<u8>().expect("a digit");
        if self.dead.contains(&number) {
            return Outcome::Refused;
        }
        if self.silent.contains(&number) {
            return Outcome::Silent;
        }
        let callee = self.members.iter_mut().find(|it| it.me.address == address);
        callee.map_or(Outcome::Refused, |it| {
            Outcome::Reply(it.answer(envelope, self.now))
        })
    }

    /// Lets those that live do what they want to for so long.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            for index in 0..self.members.len() {
                let number = self.members[index].me.id.0[0];
                while !self.dead.contains(&number) && !self.silent.contains(&number) {
                    match self.members[index].step(self.now) {
                        Step::Wait(_) => break,
                        Step::Send(address, envelope) => {
                            let outcome = self.carry(&address, &envelope);
                            self.members[index].heard(&address, envelope.to, &outcome, self.now);
                        }
                        Step::Failed(error) => {
                            assert!(matches!(error.kind, ErrorKind::Membership(_)));
                            self.errors.push(error.to_string());
                        }
                        Step::Connect(_) | Step::Finished => {}
                        Step::Excluded => {
                            let new = Id([number + 100; 16]);
                            let member = self.members.remove(index);
                            self.members.insert(index, member.rejoining(new, self.now));
                        }
                    }
                }
            }
            self.now += Duration::from_millis(100);
        }
    }

    fn reform(&mut self) {
        let now = self.now;
        self.members.iter_mut().for_each(|it| it.reform(&NONE, now));
    }

    /// By member: its generation, and the first digits of those that it is with.
    fn rosters(&self) -> Vec<(u64, Vec<u8>)> {
        let views = self.members.iter().filter_map(|it| it.view());
        views
            .map(|view| {
                let ids = view.roster.members.iter().map(|it| it.id.0[0]);
                (view.roster.generation(), ids.collect())
            })
            .collect()
    }
}

#[test]
fn survivors_of_a_death_are_the_next_group_at_once() {
    let mut job = Job::new(4);
    job.dead.push(1);
    job.members.remove(0);
    job.reform();
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters(), vec![(2, vec![2, 3, 4]); 3]);
}

#[test]
fn silent_members_are_waited_for_and_then_left_out_by_a_majority() {
    let mut job = Job::new(3);
    job.silent.push(3);
    job.reform();
    job.pass(Duration::from_secs(9));
    assert_eq!(job.rosters(), vec![(1, vec![1, 2, 3]); 3]);
    job.pass(Duration::from_secs(4));
    assert_eq!(job.rosters()[..2], vec![(2, vec![1, 2]); 2]);
    job.members[..2].iter_mut().for_each(Member::connected);
    // It comes back, is told, and would join as another.
    job.silent.clear();
    job.pass(Duration::from_secs(4));
    assert_eq!(job.members[2].me.id, Id([103; 16]));
    let joiners: Vec<_> = job.members[0].joiners(job.now).collect();
    assert_eq!(joiners, [&job.members[2].me]);
    job.reform();
    job.pass(Duration::from_secs(2));
    assert_eq!(job.rosters(), vec![(3, vec![1, 2, 103]); 3]);
}

#[test]
fn nobody_stops_for_a_joiner_of_which_the_proposer_alone_knows_that_it_is_dead() {
    let mut job = Job::new(3);
    let (timing, now) = (Timing::default(), job.now);
    let addresses = (1..=3).map(|it| peer(it).address);
    let joiner = Member::joining(peer(5), addresses, timing, 1..=8, now);
    job.members.push(joiner);
    job.pass(Duration::from_millis(200));
    job.members.pop();
    job.dead.push(5);
    job.reform();
    job.pass(Duration::from_secs(2));
    assert_eq!(job.rosters(), vec![(2, vec![1, 2, 3]); 3]);
    job.members.iter_mut().for_each(Member::connected);
    job.pass(Duration::from_secs(60));
    let waits = |member: &Member| member.joiners(job.now).next().is_some();
    assert!(!job.members.iter().any(waits));
}

#[test]
fn joiners_take_the_ranks_of_the_dead_and_the_others_keep_theirs() {
    for (dead, joiners, next) in [
        (&[1, 3][..], &[5, 6][..], &[5, 2, 6, 4][..]),
        (&[3], &[5, 6], &[1, 2, 5, 4, 6]),
        (&[1, 3], &[5], &[5, 2, 4]),
        (&[1, 3], &[], &[2, 4]),
    ] {
        let mut job = Job::new(4);
        job.dead.extend(dead);
        let (timing, now) = (Timing::default(), job.now);
        job.members.extend(joiners.iter().map(|&joiner| {
            let addresses = ["h2:1".to_owned()];
            Member::joining(peer(joiner), addresses, timing.clone(), 1..=8, now)
        }));
        job.pass(Duration::from_millis(200));
        job.members.retain(|it| !dead.contains(&it.me.id.0[0]));
        job.reform();
        job.pass(Duration::from_secs(2));
        assert_eq!(job.rosters(), vec![(2, next.to_vec()); next.len()]);
    }
}

#[test]
fn a_death_before_all_are_connected_calls_the_others_and_is_made_good_at_once() {
    for dead in 1..=4 {
        let mut job = Job::new(4);
        job.reform();
        job.pass(Duration::from_secs(1));
        assert_eq!(job.rosters(), vec![(2, vec![1, 2, 3, 4]); 4]);
        job.dead.push(dead);
        job.members.retain(|it| it.me.id.0[0] != dead);
        job.pass(Duration::from_millis(500));
        let called: Vec<_> = job
            .members
            .iter()
            .filter(|it| it.must_reconfigure())
            .collect();
        // It is watched by the one before it.
        assert_eq!(called.len(), 1);
        assert_eq!(called[0].me.id.0[0] % 4 + 1, dead);
        let caller = called[0].me.id;
        let now = job.now;
        let caller = job.members.iter_mut().find(|it| it.me.id == caller);
        caller.expect("it lives").reform(&NONE, now);
        // It does not wait for its turn.
        job.pass(Duration::from_millis(100));
        let calls = job
            .members
            .iter()
            .filter(|it| it.must_reconfigure())
            .count();
        assert_eq!(calls, 2);
        job.reform();
        job.pass(Duration::from_millis(800));
        let left: Vec<_> = (1..=4).filter(|it| *it != dead).collect();
        assert_eq!(job.rosters(), vec![(3, left); 3]);
    }
}

#[test]
fn who_connects_must_reconfigure_if_the_next_of_the_ring_has_promised_to_others() {
    let mut job = Job::new(3);
    job.reform();
    job.pass(Duration::from_secs(1));
    let (base, now) = (job.members[0].view().cloned(), job.now);
    let gather = Request::Gather {
        ballot: Ballot {
            round: 9,
            proposer: job.members[2].me.id,
        },
        base: base.expect("it is at a roster"),
        news: News::default(),
    };
    let (_, envelope) = job.members[2].envelope(&peer(2), gather);
    job.members[1].reform(&NONE, now);
    let promise = job.members[1].answer(&envelope, now);
    assert!(matches!(promise, Reply::Promise { .. }));
    job.pass(Duration::from_millis(500));
    assert!(job.members[0].must_reconfigure());
    let call = job.members[0].reconfigured_by();
    assert_eq!(
        call.as_deref(),
        Some("rank 1 at h2:1 takes part in another group")
    );
}

#[test]
fn half_of_the_members_stop_with_an_error_that_names_the_others() {
    let mut job = Job::new(4);
    job.silent.extend([3, 4]);
    job.reform();
    job.pass(Duration::from_secs(200));
    assert_eq!(job.rosters(), vec![(1, vec![1, 2, 3, 4]); 4]);
    assert_eq!(
        job.errors[0],
        "2 members reach each other and no others, and so cannot be more than half of generation 1; \
         nothing has proved that h3:1, h4:1 ended, and they may have gone on without this process (60 s); \
         look at those hosts and the network to them; where the job goes on, start this process again to \
         join it, and where it does not, start all from the last checkpoint"
    );
}

#[test]
fn a_proposer_that_dies_is_replaced_as_soon_as_its_address_refuses() {
    let mut job = Job::new(4);
    job.reform();
    for _ in 2..=4 {
        let Step::Send(address, envelope) = job.members[0].step(job.now) else {
            panic!("it asks all for a promise");
        };
        let outcome = job.carry(&address, &envelope);
        assert!(matches!(outcome, Outcome::Reply(Reply::Promise { .. })));
    }
    job.dead.push(1);
    job.members.remove(0);
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters(), vec![(3, vec![2, 3, 4]); 3]);
}

#[test]
fn a_member_that_says_goodbye_is_not_waited_for() {
    let mut job = Job::new(3);
    let calls = job.members[0].leave();
    for (address, envelope) in calls {
        job.carry(&address, &envelope);
    }
    assert!(job.members[1].must_reconfigure() && job.members[2].must_reconfigure());
    job.silent.push(1);
    job.reform();
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters()[1..], vec![(2, vec![2, 3]); 2]);
}

#[test]
fn who_hears_that_all_have_come_to_the_end_needs_no_other_group() {
    let mut job = Job::new(3);
    let farewells = job.members[0].finish();
    for (address, envelope) in farewells {
        job.carry(&address, &envelope);
    }
    let now = job.now;
    // It may still be in the last collective.
    assert!(matches!(job.members[1].step(now), Step::Wait(_)));
    job.members[1].reform(&NONE, now);
    assert_eq!(job.members[1].step(now), Step::Finished);
    assert_eq!(job.members[1].step(now), Step::Wait(None));
}

#[test]
fn the_end_of_a_group_is_not_that_of_the_next_one() {
    let mut job = Job::new(3);
    let farewells = job.members[0].finish();
    job.members.remove(0);
    job.dead.push(1);
    job.reform();
    job.pass(Duration::from_secs(1));
    for (address, envelope) in farewells {
        job.carry(&address, &envelope);
    }
    job.reform();
    job.pass(Duration::from_secs(2));
    assert_eq!(job.rosters(), vec![(3, vec![2, 3]); 2]);
}

#[test]
fn two_that_cannot_connect_are_quarantined_if_the_others_are_enough() {
    let mut job = Job::new(4);
    let now = job.now;
    let ids: Vec<_> = job.members.iter().map(|it| it.me.id).collect();
    for (index, member) in job.members.iter_mut().enumerate() {
        let unreached = if index == 3 { vec![ids[1]] } else { Vec::new() };
        member.reform(&unreached, now);
    }
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters()[..3], vec![(2, vec![1, 2, 3]); 3]);
}

#[test]
fn two_that_fail_to_connect_again_are_quarantined_for_twice_as_long() {
    let mut job = Job::new(4);
    let (apart, now) = (Timing::default().quarantine, job.now);
    let member = &mut job.members[0];
    let mut begun = now;
    for times in [1, 2, 4, 8, 16, 32, 32] {
        member.quarantine("h4:1".into(), begun);
        let end = begun + apart * times;
        assert!(member.is_quarantined("h4:1", end - Duration::from_millis(1)));
        assert!(!member.is_quarantined("h4:1", end));
        begun = end;
    }
    member.connected();
    member.quarantine("h4:1".into(), begun);
    assert!(!member.is_quarantined("h4:1", begun + apart));
}

#[test]
fn a_group_stops_ever_more_rarely_for_a_joiner_that_it_leaves_out() {
    let mut job = Job::new(4);
    let ids: Vec<_> = job.members.iter().map(|it| it.me.id).collect();
    for (index, member) in job.members.iter_mut().enumerate() {
        member.timing.quarantine = Duration::from_secs(60);
        let unreached = if index == 1 { vec![ids[3]] } else { Vec::new() };
        member.reform(&unreached, job.now);
    }
    let mut stops = 0;
    for _ in 0..150 {
        job.pass(Duration::from_millis(400));
        let left_out = job.members.iter().position(|it| it.me.id.0[0] > 100);
        let group = |index: &usize| Some(*index) != left_out;
        let in_group: Vec<_> = (0..4).filter(group).collect();
        for &index in &in_group {
            job.members[index].connected();
        }
        let waits = |index: &usize| job.members[*index].joiners(job.now).next().is_some();
        if in_group.iter().any(waits) {
            stops += 1;
            let now = job.now;
            for index in in_group {
                job.members[index].reform(&NONE, now);
            }
        }
    }
    // At once, and then after 1, 2, 4, 8, 16 and 32 s.
    assert!((5..=8).contains(&stops), "{stops} stops in a minute");
    job.pass(Duration::from_secs(2));
    let (generation, _) = job.rosters()[0];
    assert!(generation < 12, "generation {generation}");
}

/// Members 2, 3 and 4 are a group, and a joiner has accepted a roster of which they know nothing.
fn left_out_joiner() -> Job {
    let mut job = Job::new(4);
    let (timing, now) = (Timing::default(), job.now);
    let joiner = Member::joining(peer(5), ["h2:1".to_owned()], timing, 1..=8, now);
    job.members.push(joiner);
    job.pass(Duration::from_millis(200));
    job.reform();
    // The proposer dies when nobody but the joiner has accepted its roster.
    loop {
        match job.members[0].step(job.now) {
            Step::Send(address, envelope) => {
                let is_last = matches!(envelope.request, Request::Install(_));
                if is_last && address != "h5:1" {
                    continue;
                }
                let outcome = job.carry(&address, &envelope);
                job.members[0].heard(&address, envelope.to, &outcome, job.now);
                if is_last {
                    break;
                }
            }
            step => assert!(matches!(step, Step::Connect(_)), "{step:?}"),
        }
    }
    job.dead.push(1);
    job.members.remove(0);
    let now = job.now;
    assert!(matches!(job.members[3].step(now), Step::Connect(_)));
    job.members[3].reform(&NONE, now);
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters()[..3], vec![(3, vec![2, 3, 4]); 3]);
    job.members[..3].iter_mut().for_each(Member::connected);
    job
}

#[test]
fn a_joiner_that_is_told_of_a_group_without_it_joins_that_as_another_one() {
    let mut job = left_out_joiner();
    for _ in 0..2 {
        // It reminds them of itself, and they stop for it.
        job.pass(Duration::from_secs(2));
        let now = job.now;
        job.members[..3]
            .iter_mut()
            .for_each(|it| it.reform(&NONE, now));
        job.pass(Duration::from_secs(1));
        job.members[..3].iter_mut().for_each(Member::connected);
    }
    assert_eq!(job.members[3].me.id, Id([105; 16]));
    assert_eq!(job.rosters(), vec![(5, vec![2, 3, 4, 105]); 4]);
}

#[test]
fn a_joiner_without_which_the_others_came_to_the_end_waits_for_nobody() {
    let mut job = left_out_joiner();
    job.dead.extend([2, 3, 4]);
    job.members.drain(..3);
    job.pass(Duration::from_secs(6));
    assert!(matches!(job.members[0].phase, Phase::Over));
    assert_eq!(job.errors.len(), 1, "{:?}", job.errors);
}

#[test]
fn a_joiner_that_all_turn_away_says_why_at_once() {
    let mut job = Job::new(1);
    let (timing, now) = (Timing::default(), job.now);
    let asked = ["h7:1", "h8:1"];
    let addresses = asked.map(str::to_owned);
    job.members = vec![Member::joining(peer(2), addresses, timing, 1..=8, now)];
    for address in asked {
        let why = Outcome::TurnedAway("it has another token".into());
        job.members[0].heard(address, None, &why, now);
    }
    job.pass(Duration::from_millis(100));
    assert!(job.errors[0].starts_with(
        "the job does not let this process join: h7:1: it has another token, h8:1: it has another token; \
         give it the job's own GRADRING_TOKEN"
    ));
}

#[test]
fn a_joiner_that_finds_no_member_says_where_it_asked() {
    let addresses = ["h7:1".to_owned(), "h8:1".to_owned()];
    let mut job = Job::new(1);
    job.dead.push(1);
    let (timing, now) = (Timing::default(), job.now);
    job.members = vec![Member::joining(peer(2), addresses, timing, 1..=8, now)];
    job.pass(Duration::from_secs(61));
    assert_eq!(
        job.errors,
        [
            "no member of the job answered at h7:1, h8:1 within 60 s; start more workers, or the job \
             again from its last checkpoint"
        ]
    );
}
