use super::*;

fn waits(awaited: &[usize], seconds: u64) -> Waits {
    Waits {
        awaited: awaited.to_vec(),
        idle: Duration::from_secs(seconds),
        beside: None,
        in_advance: false,
    }
}

fn diagnose(calls: &[Option<&str>]) -> Error {
    let mut diagnosis = Diagnosis::new(4, calls.len());
    diagnosis.about_stall(vec![0], Duration::from_secs(30));
    for (rank, call) in calls.iter().enumerate() {
        assert!(diagnosis.receive(Report {
            rank,
            sequence: 4,
            entered: call.map(|call| Entered {
                header: call.as_bytes().into(),
                call: call.into(),
                step: 0,
                left: None,
            }),
            waits: call.map(|_| waits(&[(rank + 1) % calls.len()], 60 - rank as u64)),
        }));
    }
    assert!(diagnosis.complete());
    diagnosis.cause(&vec![String::from("h"); calls.len()])
}

fn blamed(error: &Error) -> usize {
    error.blamed.as_ref().unwrap().rank
}

#[test]
fn the_odd_one_out_is_blamed_wherever_it_is() {
    for odd in 0..4 {
        let mut calls = [Some("a"); 4];
        calls[odd] = Some("b");
        let error = diagnose(&calls);
        assert_eq!(blamed(&error), odd);
        assert!(matches!(&error.kind, ErrorKind::Mismatch { theirs, .. } if &**theirs == "b"));
    }
    assert_eq!(blamed(&diagnose(&[Some("a"), Some("b")])), 1);
}

#[test]
fn calls_that_differ_in_their_step_alone_are_told_apart() {
    let mut diagnosis = Diagnosis::new(4, 2);
    for rank in 0..2 {
        let step = 3 + rank as u64;
        assert!(diagnosis.receive(Report {
            rank,
            sequence: 4,
            entered: Some(Entered {
                header: vec![step as u8],
                call: "a".into(),
                step,
                left: (rank == 1).then(|| (3, "ValueError: bad".into())),
            }),
            waits: None,
        }));
    }
    let error = diagnosis.cause(&["h"; 2].map(String::from)).to_string();
    let expected = "rank 1 on h called a in step 4, after it left step 3 by ValueError: bad; the \
                others called a in step 3 (rank 0)";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_rank_that_has_not_entered_is_late() {
    let error = diagnose(&[Some("a"), Some("a"), None]);
    assert_eq!(blamed(&error), 2);
    assert!(matches!(error.kind, ErrorKind::CollectiveTimeout { .. }));
}

/// Cause of a stall on which all ranks have reported these entries and waits.
fn diagnose_waits(entered: &[bool], waits: &[Option<Waits>]) -> Error {
    let mut diagnosis = Diagnosis::new(4, entered.len());
    for (rank, (&entered, waits)) in entered.iter().zip(waits).enumerate() {
        assert!(diagnosis.receive(Report {
            rank,
            sequence: 4,
            entered: entered.then(|| Entered {
                header: b"a".into(),
                call: "a".into(),
                step: 0,
                left: None,
            }),
            waits: waits.clone(),
        }));
    }
    diagnosis.cause(&vec![String::from("h"); entered.len()])
}

#[test]
fn a_rank_that_waits_in_an_earlier_collective_is_not_late() {
    // Rank 0 is stuck behind rank 2, which sends it nothing; rank 1 is stuck behind rank 0.
    let waits = [Some(waits(&[2], 30)), Some(waits(&[0], 31)), None];
    let error = diagnose_waits(&[false, true, true], &waits);
    assert_eq!(blamed(&error), 2);
}

#[test]
fn a_rank_that_has_only_just_entered_is_blamed_by_all_that_waited_for_it() {
    let mut reported = [Some(waits(&[1, 2], 30)), Some(waits(&[2], 31)), None];
    let error = diagnose_waits(&[true; 3], &reported);
    assert_eq!(blamed(&error), 2);
    reported[2] = Some(waits(&[0], 29));
    let error = diagnose_waits(&[true; 3], &reported);
    assert_eq!(blamed(&error), 2, "for which most ranks wait");
    assert_eq!(error.elapsed, Some(Duration::from_secs(31)));
}

/// A wait for one rank in a call with that rank alone.
fn beside(partner: usize, seconds: u64) -> Waits {
    Waits {
        beside: Some(format!("send(dest={partner}) float64[3]")),
        ..waits(&[partner], seconds)
    }
}

#[test]
fn of_a_rank_in_the_collective_and_one_beside_it_that_wait_for_each_other_the_latter_is_to_blame() {
    // The longer wait makes no difference.
    for seconds in [29, 31] {
        let reported = [Some(waits(&[1], 30)), Some(beside(0, seconds))];
        let error = diagnose_waits(&[true, false], &reported);
        assert_eq!(blamed(&error), 1);
        let expected = "is in send(dest=0) float64[3] and has not entered this collective";
        assert!(error.to_string().contains(expected), "{error}");
    }
    // The same holds at the end of a chain.
    let reported = [
        Some(waits(&[1], 30)),
        Some(beside(2, 31)),
        Some(beside(0, 9)),
    ];
    assert_eq!(blamed(&diagnose_waits(&[true, false, false], &reported)), 2);
}

#[test]
fn a_rank_that_has_entered_in_advance_may_still_come_to_another_one() {
    let in_advance = Waits {
        in_advance: true,
        ..waits(&[1], 30)
    };
    for seconds in [29, 31] {
        let reported = [Some(in_advance.clone()), Some(beside(0, seconds))];
        let error = diagnose_waits(&[true, false], &reported);
        assert_eq!(blamed(&error), 0, "its program does something else");
    }
}

#[test]
fn a_circle_beside_a_collective_is_called_one() {
    let reported = [
        Some(waits(&[1, 2], 30)),
        Some(beside(2, 29)),
        Some(beside(1, 29)),
    ];
    let error = diagnose_waits(&[true, false, false], &reported).to_string();
    assert!(
        error.contains("ranks 2 and 1 wait for each other"),
        "{error}"
    );
    // One of them has begun the collective in advance.
    let reported = [Some(beside(1, 29)), Some(beside(0, 29))];
    let error = diagnose_waits(&[true, false], &reported).to_string();
    assert!(
        error.contains("ranks 0 and 1 wait for each other"),
        "{error}"
    );
}

fn entered_a() -> Entered {
    Entered {
        header: b"a".into(),
        call: "a".into(),
        step: 0,
        left: None,
    }
}

#[test]
fn of_the_silent_ranks_the_one_that_is_awaited_is_named() {
    let mut diagnosis = Diagnosis::new(1, 4);
    diagnosis.about_stall(vec![2], Duration::from_secs(1));
    diagnosis.receive(Report {
        rank: 3,
        sequence: 1,
        entered: Some(entered_a()),
        waits: Some(waits(&[2], 1)),
    });
    assert_eq!(blamed(&diagnosis.cause(&["h"; 4].map(String::from))), 2);
}

#[test]
fn a_rank_that_has_called_something_else_and_does_not_answer_is_told_by_its_header() {
    let mut diagnosis = Diagnosis::new(1, 2);
    diagnosis.about_header(1, "7 elements of float32".into());
    diagnosis.receive(Report {
        rank: 0,
        sequence: 1,
        entered: Some(entered_a()),
        waits: None,
    });
    let error = diagnosis.cause(&["h"; 2].map(String::from));
    assert_eq!(blamed(&error), 1);
    let expected = "called something else: 7 elements of float32; the others called a";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn the_rank_awaited_for_longest_is_blamed_when_all_have_entered() {
    // Rank 0 has waited longest, for rank 1; the asking rank itself waits for rank 0.
    let error = diagnose(&[Some("a"); 3]);
    assert_eq!(blamed(&error), 1);
    assert!(matches!(error.kind, ErrorKind::CollectiveTimeout { .. }));
}

#[test]
fn a_header_that_differs_though_all_called_alike_was_changed_on_its_way() {
    let mut diagnosis = Diagnosis::new(4, 3);
    diagnosis.about_header(2, "changed".into());
    for rank in 0..3 {
        // Rank 1 has not come so far, which is not the failure.
        let entered = (rank != 1).then(|| Entered {
            header: b"a".into(),
            call: "a".into(),
            step: 0,
            left: None,
        });
        diagnosis.receive(Report {
            rank,
            sequence: 4,
            entered,
            waits: None,
        });
    }
    let error = diagnosis.cause(&vec![String::from("h"); 3]);
    assert_eq!(blamed(&error), 2);
    assert!(matches!(error.kind, ErrorKind::Protocol { .. }));
}

/// Statement of a rank that has ended collective `done` and is in `under_way`.
fn states(rank: usize, done: Option<u64>, under_way: Option<u64>, call: &str) -> Statement {
    let known = |sequence, done| Known {
        sequence,
        call: Some((call.into(), 0)),
        done,
    };
    let done = done.map(|sequence| known(sequence, true));
    let under_way = under_way.map(|sequence| known(sequence, false));
    Statement {
        rank,
        collectives: done.into_iter().chain(under_way).collect(),
        awaited: Vec::new(),
        idle: Duration::from_secs(1),
    }
}

#[test]
fn from_outside_a_rank_that_waits_for_one_that_has_entered_is_late() {
    let waits_for = |awaited, statement| Statement {
        awaited: vec![awaited],
        ..statement
    };
    let statements = [
        waits_for(1, states(0, Some(1), Some(2), "a")),
        waits_for(0, states(1, Some(1), None, "a")),
    ];
    let found = super::diagnose(2, &statements).unwrap();
    assert_eq!((found.problem, found.blamed), (Problem::Late, Some(1)));
    assert_eq!(found.late, [1]);
}

#[test]
fn from_outside_the_first_collective_that_is_not_done_is_in_question() {
    let statements = [
        states(0, Some(6), Some(7), "a"),
        states(1, Some(5), Some(6), "a"),
        states(2, Some(5), None, "a"),
        states(9, None, Some(6), "of a rank that does not exist"),
    ];
    let found = super::diagnose(3, &statements).unwrap();
    assert_eq!((found.sequence, found.problem), (6, Problem::Late));
    assert_eq!((found.blamed, found.late), (Some(2), vec![2]));
    assert_eq!(found.calls, [("a".to_owned(), vec![0, 1])]);
    assert_eq!(super::diagnose(3, &statements[2..3]), None);
}

#[test]
fn a_rank_that_has_gone_on_and_forgotten_the_call_is_neither_late_nor_different() {
    let statements = [
        states(0, Some(90), None, "b"),
        states(1, None, Some(7), "a"),
    ];
    let found = super::diagnose(2, &statements).unwrap();
    assert_eq!((found.late, found.problem), (vec![], Problem::Changed));
    assert_eq!(found.blamed, None);
    let odd = [states(0, None, Some(7), "b"), statements[1].clone()];
    let found = super::diagnose(2, &odd).unwrap();
    assert_eq!((found.problem, found.blamed), (Problem::Different, Some(1)));
    assert_eq!(found.calls.len(), 2);
}

#[test]
fn a_silent_rank_is_named() {
    let mut diagnosis = Diagnosis::new(1, 2);
    diagnosis.about_stall(vec![1], Duration::from_secs(1));
    diagnosis.receive(Report {
        rank: 0,
        sequence: 1,
        entered: None,
        waits: None,
    });
    assert!(!diagnosis.complete());
    assert_eq!(blamed(&diagnosis.cause(&["h".into(), "h".into()])), 0);
}
