use super::*;
use crate::consensus::message::{News, Outcome, Reply};
use crate::error::ErrorKind;

const NONE: [Id; 0] = [];

pub(super) fn peer(number: u8) -> Peer {
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

    /// Lets living members act for this time.
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
                            self.members[index].on_outcome(
                                &address,
                                envelope.to,
                                &outcome,
                                self.now,
                            );
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

    /// Generation of each member, and the first digits of the members in its roster.
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
    // It comes back, learns of its exclusion, and would join under a new id.
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
        let reconfiguring: Vec<_> = job
            .members
            .iter()
            .filter(|it| it.must_reconfigure())
            .collect();
        // Its predecessor in the ring watches it.
        assert_eq!(reconfiguring.len(), 1);
        assert_eq!(reconfiguring[0].me.id.0[0] % 4 + 1, dead);
        let caller = reconfiguring[0].me.id;
        let now = job.now;
        let caller = job.members.iter_mut().find(|it| it.me.id == caller);
        caller.expect("it lives").reform(&NONE, now);
        // That member does not wait for its turn.
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
    let gather = MemberRequest::Gather {
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
fn who_forms_a_new_group_and_is_in_none_of_this_ones_places_is_named_by_address() {
    let mut job = Job::new(3);
    let base = job.members[0].view().cloned();
    let envelope = gather(9, ballot(9, 9), base.expect("it is at a roster"));
    let reply = job.members[0].answer(&envelope, job.now);
    assert!(matches!(reply, Reply::Busy));
    let call = job.members[0].reconfigured_by();
    assert_eq!(
        call.as_deref(),
        Some("the process at h9:1 forms a new group")
    );
    job.reform();
    assert_eq!(job.members[0].reconfigured_by(), None);
}

#[test]
fn half_of_the_members_stop_with_an_error_that_names_the_others() {
    let mut job = Job::new(4);
    job.silent.extend([3, 4]);
    job.reform();
    job.pass(Duration::from_secs(60));
    assert!(job.errors.is_empty());
    job.pass(Duration::from_secs(1));
    assert_eq!(job.errors.len(), 1);
    job.pass(Duration::from_secs(139));
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
    // The member may still be in the last collective.
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
    // A job of `size` members needs `workers`, and one member cannot reach another.
    for (size, (one, other), workers, next) in [
        (4, (4, 2), 1, &[1, 2, 3][..]),
        (4, (1, 2), 1, &[1, 3, 4]),
        (4, (4, 2), 3, &[1, 2, 3]),
        (4, (4, 2), 4, &[1, 2, 3, 4]),
        (2, (1, 2), 1, &[1, 2]),
    ] {
        let mut job = Job::new(size);
        for member in &mut job.members {
            member.workers = workers..=8;
            let is_one = member.me.id == peer(one).id;
            let unreached = is_one.then_some(peer(other).id);
            member.reform(unreached.as_slice(), job.now);
        }
        job.pass(Duration::from_secs(1));
        let mut rosters = job.rosters();
        rosters.retain(|(generation, _)| *generation > 1);
        assert_eq!(rosters, vec![(2, next.to_vec()); next.len()]);
    }
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
    // The first stop comes at once, the next ones after 1, 2, 4, 8, 16 and 32 s.
    assert!((5..=8).contains(&stops), "{stops} stops in a minute");
    job.pass(Duration::from_secs(2));
    let (generation, _) = job.rosters()[0];
    assert!(generation < 12, "generation {generation}");
}

/// Members 2, 3 and 4 are a group, and a joiner has accepted a roster that they do not know.
fn left_out_joiner() -> Job {
    let mut job = Job::new(4);
    let (timing, now) = (Timing::default(), job.now);
    let joiner = Member::joining(peer(5), ["h2:1".to_owned()], timing, 1..=8, now);
    job.members.push(joiner);
    job.pass(Duration::from_millis(200));
    job.reform();
    // The proposer dies when only the joiner has accepted its roster.
    loop {
        match job.members[0].step(job.now) {
            Step::Send(address, envelope) => {
                let is_last = matches!(envelope.request, MemberRequest::Install(_));
                if is_last && address != "h5:1" {
                    continue;
                }
                let outcome = job.carry(&address, &envelope);
                job.members[0].on_outcome(&address, envelope.to, &outcome, job.now);
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
        // The joiner repeats its request, and the group stops for it.
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
    assert!(matches!(job.members[0].phase, MemberPhase::Over));
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
        job.members[0].on_outcome(address, None, &why, now);
    }
    job.pass(Duration::from_millis(100));
    assert!(job.errors[0].starts_with(
        "the job does not let this process join: h7:1: it has another token, h8:1: it has another token; \
         give it the job's own GRADRING_TOKEN"
    ));
}

#[test]
fn a_joiner_that_some_turn_away_asks_the_others_for_as_long_as_it_may() {
    let mut job = Job::new(1);
    let (timing, now) = (Timing::default(), job.now);
    let addresses = ["h7:1", "h8:1"].map(str::to_owned);
    job.members = vec![Member::joining(peer(2), addresses, timing, 1..=8, now)];
    let why = Outcome::TurnedAway("it has another token".into());
    for _ in 0..60 {
        job.members[0].on_outcome("h7:1", None, &why, job.now);
        job.members[0].on_outcome("h8:1", None, &Outcome::Silent, job.now);
        assert!(matches!(job.members[0].step(job.now), Step::Wait(_)));
        job.now += Duration::from_secs(1);
    }
    let Step::Failed(error) = job.members[0].step(job.now) else {
        panic!("nobody has let it in");
    };
    assert!(
        error.to_string().contains("h7:1: it has another token"),
        "{error}"
    );
}

#[test]
fn a_joiner_asks_the_members_of_which_it_is_told_as_far_as_it_can_keep_them_in_mind() {
    let now = Instant::now();
    let asking = |count: usize| {
        let addresses = (0..count).map(|number| format!("h{number}:2"));
        Member::joining(peer(2), addresses, Timing::default(), 1..=8, now)
    };
    for (known, others, asks) in [
        (1, vec![], 1),
        (1, vec![2], 1),
        (1, vec![1, 2, 3], 3),
        (KNOWN_MAX - 1, vec![1, 3], KNOWN_MAX),
        (KNOWN_MAX, vec![1], KNOWN_MAX),
    ] {
        let mut member = asking(known);
        let is_told = !others.is_empty();
        let noted = Reply::Noted(others.into_iter().map(peer).collect());
        member.on_outcome("h0:2", None, &Outcome::Reply(noted), now);
        let MemberPhase::Joining(joining) = &member.phase else {
            panic!("it joins");
        };
        assert_eq!((joining.asked.len(), joining.is_known), (asks, is_told));
    }
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
            "no member of the job answered at h7:1, h8:1 within 60 s; correct GRADRING_JOIN, or start the \
             job again from its last checkpoint"
        ]
    );
}

#[test]
fn the_state_of_a_process_has_a_name() {
    let (now, timing) = (Instant::now(), Timing::default());
    let roster = Roster::founding(vec![peer(1), peer(2)]);
    let mut member = Member::founding(peer(1), roster, timing.clone(), 1..=8);
    let mut phases = vec![member.phase()];
    member.reform(&NONE, now);
    phases.push(member.phase());
    member.leave();
    phases.push(member.phase());
    phases.push(Member::joining(peer(1), [], timing, 1..=8, now).phase());
    assert_eq!(phases, ["Together", "Reforming", "Over", "Joining"]);
}

#[test]
fn too_few_workers_wait_for_joiners_before_they_stop() {
    let mut job = Job::new(4);
    for member in &mut job.members {
        member.workers = 4..=8;
    }
    job.dead.push(4);
    job.members.pop();
    job.reform();
    job.pass(Timing::default().workers);
    assert!(job.errors.is_empty());
    job.pass(Duration::from_millis(100));
    assert_eq!(job.errors.len(), 1);
    assert!(job.errors[0].contains("600 s"), "{}", job.errors[0]);
}

#[test]
fn a_joiner_that_is_silent_is_not_waited_for_longer_than_a_joiner_may_be() {
    let mut job = Job::new(3);
    for index in 0..3 {
        let (from, to, request) = (peer(5), None, MemberRequest::Join);
        let envelope = Envelope { from, to, request };
        job.members[index].answer(&envelope, job.now);
    }
    job.silent.push(5);
    job.reform();
    job.pass(Timing::default().joiner);
    assert_eq!(job.rosters(), vec![(1, vec![1, 2, 3]); 3]);
    job.pass(Duration::from_secs(1));
    assert_eq!(job.rosters(), vec![(2, vec![1, 2, 3]); 3]);
}

#[test]
fn a_member_that_does_not_come_back_from_its_step_is_left_out_and_counts_as_there_until_then() {
    let mut job = Job::new(3);
    let (now, busy) = (job.now, Duration::from_secs(20));
    for member in &mut job.members[..2] {
        member.timing.busy = busy;
        member.reform(&NONE, now);
    }
    job.pass(busy - Duration::from_secs(1));
    assert_eq!(job.rosters(), vec![(1, vec![1, 2, 3]); 3]);
    job.pass(Duration::from_secs(3));
    assert_eq!(job.rosters()[..2], vec![(2, vec![1, 2]); 2]);
    // One of two is busy and then silent, so they are no quorum from the end of its grace period.
    let mut job = Job::new(2);
    job.members[0].reform(&NONE, job.now);
    job.pass(Duration::from_secs(100));
    job.silent.push(2);
    job.pass(Duration::from_secs(50));
    assert!(job.errors.is_empty(), "{:?}", job.errors);
    job.pass(Duration::from_secs(25));
    assert_eq!(job.errors.len(), 1);
}

/// Member 3 of a group of four that re-forms, at a time long after it began.
fn reforming() -> (Member, Instant) {
    let mut job = Job::new(4);
    let now = job.now + Duration::from_secs(100);
    job.members[2].reform(&NONE, now);
    (job.members.swap_remove(2), now)
}

fn state(member: &mut Member) -> &mut Reforming {
    match &mut member.phase {
        MemberPhase::Reforming(reforming) => reforming,
        _ => panic!("it re-forms"),
    }
}

fn ballot(round: u64, proposer: u8) -> Ballot {
    Ballot {
        round,
        proposer: peer(proposer).id,
    }
}

fn at(round: u64, members: &[u8], is_established: bool) -> AcceptedView {
    let mut roster = Roster::founding(members.iter().map(|&it| peer(it)).collect());
    roster.ballot.round = round;
    AcceptedView {
        roster,
        is_established,
    }
}

fn gather(from: u8, ballot: Ballot, base: AcceptedView) -> Envelope {
    let news = News::default();
    Envelope {
        from: peer(from),
        to: None,
        request: MemberRequest::Gather { ballot, base, news },
    }
}

#[test]
fn whom_to_ask_next_is_who_is_due_and_otherwise_there_is_a_time_to_look_again() {
    let (mut member, now) = reforming();
    let ms = Duration::from_millis;
    let (again, peers) = (member.timing.again, [peer(1), peer(2)]);
    for (due, wait) in [
        (ms(0), None),
        (ms(50), Some(ms(50))),
        (again, Some(again)),
        (10 * again, Some(again)),
    ] {
        member.contacts.clear();
        let asked = member.contacts.entry(peers[0].id).or_default();
        asked.is_asked = true;
        let next = member.contacts.entry(peers[1].id).or_default();
        next.due = Some(now + due);
        match member.ask(&peers, &MemberRequest::Leave, now) {
            Step::Wait(until) => assert_eq!(until, wait.map(|wait| now + wait)),
            Step::Send(address, _) => assert_eq!((address.as_str(), wait), ("h2:1", None)),
            step => panic!("{step:?}"),
        }
    }
}

#[test]
fn a_process_that_is_told_of_a_surer_group_without_it_proposes_at_once_but_once() {
    let (mut member, now) = reforming();
    let later = now + Duration::from_secs(1);
    for (base, at_once) in [
        (at(2, &[1, 9], false), false),
        (at(2, &[1, 9], true), true),
        (at(2, &[1, 9], true), false),
    ] {
        state(&mut member).propose_at = later;
        let reply = member.answer(&gather(9, ballot(5, 9), base), now);
        assert!(matches!(reply, Reply::Elsewhere(_)));
        assert_eq!(state(&mut member).propose_at == now, at_once);
    }
    // An older roster is no reason to propose earlier.
    member.view = Some(at(4, &[1, 2, 3], true));
    state(&mut member).elsewhere.clear();
    let reply = member.answer(&gather(9, ballot(5, 9), at(2, &[9], true)), now);
    assert!(matches!(reply, Reply::Elsewhere(_)));
    assert_eq!(state(&mut member).propose_at, later);
}

#[test]
fn a_promise_gives_the_own_proposal_up_and_the_proposer_time() {
    let (mut member, mut now) = reforming();
    now += Duration::from_secs(1);
    assert!(matches!(member.step(now), Step::Send(..)));
    let (base, turn) = (member.view.clone().expect("it is at one"), member.turn());
    let reply = member.answer(&gather(1, ballot(9, 1), base), now);
    assert!(matches!(reply, Reply::Promise { .. }));
    let (quiet, again) = (member.timing.quiet, member.timing.again);
    assert_eq!(member.contacts[&peer(1).id].due, Some(now + again));
    let reforming = state(&mut member);
    assert!(reforming.proposal.is_none());
    assert_eq!(reforming.propose_at, now + quiet + turn);
    assert_eq!(reforming.follows, Some(peer(1)));
    // Meanwhile the member watches the proposer. If that dies, it proposes in its turn.
    let wait = member.step(now);
    assert_eq!(wait, Step::Wait(Some(now + again)));
    member.on_outcome("h1:1", Some(peer(1).id), &Outcome::Refused, now);
    assert_eq!(state(&mut member).propose_at, now + turn);
    assert_eq!(member.step(now), Step::Wait(Some(now + turn)));
}

#[test]
fn when_a_process_is_asked_again_and_whether_its_answer_ends_a_proposal() {
    let (mut member, mut now) = reforming();
    now += Duration::from_secs(1);
    let (quiet, again) = (member.timing.quiet, member.timing.again);
    let promise = |ballot| Reply::Promise {
        ballot,
        view: None,
        news: News::default(),
    };
    for (reply, due, is_given_up) in [
        (promise(ballot(2, 3)), quiet / 3, false),
        (promise(ballot(1, 3)), again, false),
        (Reply::Busy, again, false),
        (Reply::Behind(ballot(1, 4)), again, false),
        (Reply::Behind(ballot(2, 3)), again, false),
        (Reply::Behind(ballot(2, 4)), again, true),
    ] {
        member.step(now);
        assert_eq!(member.promised, ballot(2, 3));
        let outcome = Outcome::Reply(reply);
        member.on_outcome("h1:1", Some(peer(1).id), &outcome, now);
        assert_eq!(member.contacts[&peer(1).id].due, Some(now + due));
        let is_none = state(&mut member).proposal.is_none();
        assert_eq!(is_none, is_given_up, "{outcome:?}");
    }
}

#[test]
fn a_proposer_that_gives_way_pauses_longer_each_time_and_the_later_ones_longer() {
    let (mut member, now) = reforming();
    for (doubled, turns) in [(2, 1), (4, 2), (8, 3), (16, 4), (16, 4)] {
        member.yield_to(peer(4).id, ballot(7, 4), now);
        let pause = member.timing.stagger * doubled + member.turn() * turns;
        assert_eq!(state(&mut member).propose_at, now + pause);
    }
    assert_eq!(state(&mut member).round, 7);
}

#[test]
fn a_higher_roster_with_this_process_in_it_is_the_base_of_its_next_proposal() {
    for (members, is_base) in [(&[1, 2, 3][..], true), (&[1, 2], false)] {
        let (mut member, mut now) = reforming();
        now += Duration::from_secs(1);
        member.step(now);
        let view = at(2, members, false);
        let promise = Reply::Promise {
            ballot: ballot(2, 3),
            view: Some(view.clone()),
            news: News::default(),
        };
        let outcome = Outcome::Reply(promise);
        member.on_outcome("h1:1", Some(peer(1).id), &outcome, now);
        member.step(now);
        let reforming = state(&mut member);
        let proposal = reforming.proposal.as_ref().expect("it proposes");
        assert_eq!(proposal.base == view, is_base);
        assert_eq!(reforming.elsewhere.contains_key(&peer(1).id), !is_base);
        assert_eq!(proposal.ballot, ballot(2 + u64::from(is_base), 3));
    }
}

#[test]
fn a_process_that_was_stopped_asks_all_again_and_holds_no_silence_against_them() {
    for (stopped, forgets) in [(0, false), (1, true)] {
        let (mut member, begin) = reforming();
        let begun = begin + Duration::from_secs(1);
        member.step(begun);
        let quiet = member.timing.quiet;
        let now = begun + quiet + Duration::from_millis(stopped);
        member.contacts.entry(peer(9).id).or_default();
        member.step(now);
        assert_eq!(!member.contacts.contains_key(&peer(9).id), forgets);
        assert_eq!(state(&mut member).lacking == now, forgets);
    }
}

#[test]
fn a_process_keeps_joiners_in_mind_that_are_neither_members_nor_dead_as_far_as_it_can() {
    let (mut member, now) = reforming();
    member.dead.insert(peer(6).id);
    let join = |from| Envelope {
        from,
        to: None,
        request: MemberRequest::Join,
    };
    for (number, is_kept) in [(1, false), (3, false), (6, false), (7, true)] {
        member.answer(&join(peer(number)), now);
        let is = member.joiners.contains_key(&peer(number).id);
        assert_eq!(is, is_kept, "{number}");
    }
    for number in 0_u32.. {
        let mut id = Id([200; 16]);
        id.0[..4].copy_from_slice(&number.to_le_bytes());
        let known = member.joiners.len();
        member.answer(&join(Peer { id, ..peer(8) }), now);
        if member.joiners.len() == known {
            break;
        }
    }
    assert_eq!(member.joiners.len(), KNOWN_MAX);
    // A member that has left is another process than the one that was meant.
    member.leave();
    assert_eq!(member.answer(&join(peer(7)), now), Reply::OtherProcess);
}

#[test]
fn a_roster_is_accepted_by_its_members_that_have_promised_its_ballot_and_no_higher_one() {
    for (promised, members, accepts) in [
        (2, &[1, 3][..], true),
        (2, &[1, 2], false),
        (3, &[1, 3], false),
        (1, &[1, 3], false),
    ] {
        let (mut member, now) = reforming();
        member.promised = ballot(promised, 1);
        member.dead = [2, 6].map(|it| peer(it).id).into();
        let view = member.view.clone().expect("it is at one");
        let none = BTreeSet::new();
        let next = members.iter().map(|&it| peer(it)).collect();
        let standing = crate::consensus::quorum::Standing::Established;
        let roster = view.roster.successor(ballot(2, 1), next, standing, &none);
        let reply = member.accept(&roster, BTreeSet::new(), now);
        assert_eq!(reply == Reply::Accepted(ballot(2, 1)), accepts);
        // Only dead processes that were members are remembered.
        let dead: &[u8] = if accepts { &[2] } else { &[2, 6] };
        assert!(
            member
                .dead
                .iter()
                .map(|id| id.0[0])
                .eq(dead.iter().copied())
        );
        assert_eq!(member.answer_watch(ballot(2, 1)), reply);
        // A member that promised a higher ballot no longer reports membership.
        member.promised = ballot(9, 4);
        let watched = member.answer_watch(ballot(2, 1));
        assert_eq!(watched, Reply::Behind(ballot(9, 4)));
    }
}

#[test]
fn an_excluded_process_asks_where_it_was_and_where_others_said_that_they_are() {
    let asked = |member: Member, now| {
        let member = member.rejoining(peer(103).id, now);
        let MemberPhase::Joining(joining) = member.phase else {
            panic!("it joins");
        };
        joining.asked.into_keys().collect::<Vec<_>>()
    };
    let (mut member, now) = reforming();
    state(&mut member)
        .elsewhere
        .insert(peer(9).id, at(7, &[8, 9], true));
    let addresses = ["h1:1", "h2:1", "h4:1", "h8:1", "h9:1"];
    assert_eq!(asked(member, now), addresses);
    let connected = Job::new(4).members.swap_remove(2);
    assert_eq!(asked(connected, now), addresses[..3]);
}

#[test]
fn what_counts_no_more_is_forgotten() {
    let (mut member, now) = reforming();
    let soon = now + Duration::from_millis(1);
    member.joiners.insert(peer(7).id, peer(7));
    let passed_over = [(5, now), (6, soon), (7, now)];
    member.passed_over = passed_over
        .map(|(it, until)| (peer(it).id, (1, until)))
        .into();
    member.pass_over_joiners(now);
    let kept: Vec<_> = member.passed_over.keys().map(|id| id.0[0]).collect();
    assert_eq!(kept, [6, 7]);
    // The number of failures is remembered for the longest quarantine.
    let longest = member.timing.quarantine * 32;
    for (since, is_kept) in [(longest - Duration::from_millis(1), true), (longest, false)] {
        member.unreached = [("h8:1".to_owned(), (1, now))].into();
        member.quarantine("h9:1".into(), now + since);
        assert_eq!(member.unreached.contains_key("h8:1"), is_kept);
    }
}
