use super::*;
use crate::parameters::optimizer::{Optimizer, Sgd};
use crate::parameters::shard::Spec;

const ROWS: usize = 8;
const WIDTH: usize = 2;

/// A shard of parts whose element `n` is `n`.
fn shard(parts: usize) -> Shard {
    let values: Vec<_> = (0..ROWS * WIDTH).map(|it| it as f32).collect();
    let spec = Spec {
        rows: ROWS,
        width: WIDTH,
        decays: false,
    };
    let sgd = Optimizer::Sgd(Sgd {
        momentum: 0.0,
        is_nesterov: false,
    });
    Shard::new(sgd, &vec![(spec, Arc::new(values.into())); parts])
}

fn rows(rows: &[u32]) -> PulledPart {
    let elements = |row: &u32| [2.0 * *row as f32, 2.0 * *row as f32 + 1.0];
    PulledPart::Rows {
        rows: rows.into(),
        values: rows.iter().flat_map(elements).collect::<Vec<_>>().into(),
    }
}

fn all(shard: &Shard) -> PulledPart {
    PulledPart::All(shard.weights()[0].clone())
}

fn keep(shard: &Shard) -> PulledPart {
    PulledPart::Keep(shard.weights()[0].clone())
}

fn recorded(updates: &[(Version, Change)]) -> (Changes, Shard) {
    let (mut changes, shard) = (Changes::default(), shard(1));
    for (version, change) in updates {
        changes.record(*version, &shard, vec![change.clone()]);
    }
    (changes, shard)
}

#[test]
fn a_pull_has_the_rows_of_all_updates_since_the_weights_that_are_kept() {
    let (changes, shard) = recorded(&[
        (2, Change::Rows(vec![7])),
        (3, Change::Rows(vec![1, 4])),
        (4, Change::Nothing),
        (5, Change::Rows(vec![0, 4])),
        (6, Change::Rows(vec![])),
    ]);
    let pulled = |kept| changes.pulled(&shard, kept).remove(0);
    assert_eq!(pulled(None), keep(&shard));
    // The worker of version 1 was not told to keep its weights.
    assert_eq!(pulled(Some(1)), keep(&shard));
    for (kept, changed) in [
        (2, &[0, 1, 4][..]),
        (3, &[0, 4]),
        (4, &[0, 4]),
        (5, &[]),
        (6, &[]),
    ] {
        assert_eq!(pulled(Some(kept)), rows(changed), "{kept}");
    }
}

#[test]
fn a_part_that_changes_as_a_whole_is_not_kept() {
    let (changes, shard) = recorded(&[(2, Change::Nothing)]);
    assert_eq!(changes.pulled(&shard, Some(1)), [all(&shard)]);
    let (changes, shard) = recorded(&[(2, Change::Rows(vec![1])), (3, Change::All)]);
    assert_eq!(changes.pulled(&shard, Some(2)), [all(&shard)]);
    let updates = [2, 3, 5, 6].map(|version| (version, Change::Rows(vec![version as u32])));
    let (mut changes, shard) = recorded(&updates[..2]);
    changes.record(4, &shard, vec![Change::All]);
    for (version, change) in &updates[2..] {
        changes.record(*version, &shard, vec![change.clone()]);
    }
    let pulled = |kept| changes.pulled(&shard, Some(kept)).remove(0);
    assert_eq!(pulled(2), keep(&shard));
    assert_eq!(pulled(4), keep(&shard));
    assert_eq!(pulled(5), rows(&[6]));
}

#[test]
fn only_so_many_rows_and_updates_are_remembered_and_more_than_half_of_all_are_not_sent() {
    let four = Change::Rows(vec![0, 1, 2, 3]);
    let updates = [2, 3, 4, 5].map(|version| (version, four.clone()));
    let (changes, shard) = recorded(&updates);
    for (kept, expected) in [(2, keep(&shard)), (3, rows(&[0, 1, 2, 3])), (5, rows(&[]))] {
        assert_eq!(changes.pulled(&shard, Some(kept)), [expected], "{kept}");
    }
    let five = Change::Rows(vec![0, 1, 2, 3, 4]);
    let (changes, shard) = recorded(&[(2, four), (3, five)]);
    assert_eq!(changes.pulled(&shard, Some(2)), [keep(&shard)]);
    let last = UPDATES_MAX as Version + 3;
    let many: Vec<_> = (2..=last).map(|it| (it, Change::Rows(vec![]))).collect();
    let (changes, shard) = recorded(&many);
    assert_eq!(changes.pulled(&shard, Some(2)), [keep(&shard)]);
    assert_eq!(changes.pulled(&shard, Some(3)), [rows(&[])]);
}

const BASE: Kept = Kept {
    start: 7,
    version: 3,
};
const NOW: Kept = Kept {
    start: 7,
    version: 5,
};

/// A worker that keeps the second of two parts, and the weights that it has of both.
fn kept() -> (KeptWeights, Vec<Weights>) {
    let shard = shard(1);
    let mut kept = KeptWeights::default();
    assert_eq!(kept.kept(), None);
    let weights = kept.take(None, BASE, vec![all(&shard), keep(&shard)]);
    assert_eq!(kept.kept(), Some(BASE));
    (kept, weights.expect("they are whole"))
}

fn changed(first: u32, value: f32) -> PulledPart {
    PulledPart::Rows {
        rows: vec![first, 6],
        values: vec![value; 2 * WIDTH].into(),
    }
}

#[test]
fn rows_are_put_into_the_weights_that_are_kept_and_not_into_those_of_the_program() {
    let (mut kept, before) = kept();
    let first = Arc::new(vec![9.0; 3].into());
    let pulled = vec![PulledPart::All(first), changed(2, -1.0)];
    let weights = kept.take(Some(BASE), NOW, pulled).expect("they fit");
    assert_eq!(weights[0].of::<f32>()[..], [9.0; 3]);
    let mut expected = before[1].of::<f32>().to_vec();
    expected[4..6].fill(-1.0);
    expected[12..14].fill(-1.0);
    assert_eq!(weights[1].of::<f32>()[..], expected);
    assert_eq!(before[1], shard(1).weights()[0]);
    assert_eq!(kept.kept(), Some(NOW));
    // Without other readers, the memory stays the same.
    let place = weights[1].of::<f32>().as_ptr();
    drop((weights, before));
    let later = Kept { version: 6, ..NOW };
    let pulled = vec![PulledPart::All(Arc::default()), changed(0, -2.0)];
    let weights = kept.take(Some(NOW), later, pulled).expect("they fit");
    assert_eq!(weights[1].of::<f32>().as_ptr(), place);
    expected[..2].fill(-2.0);
    expected[12..14].fill(-2.0);
    assert_eq!(weights[1].of::<f32>()[..], expected);
    // Parts that are whole again are kept no more.
    let pulled = vec![all(&shard(1)); 2];
    assert!(kept.take(None, NOW, pulled).is_some());
    assert_eq!(kept.kept(), None);
}

#[test]
fn rows_of_other_weights_or_beyond_the_part_make_the_worker_forget_all() {
    let whole = || all(&shard(1));
    let with = |rows: Vec<u32>, values: usize| PulledPart::Rows {
        rows,
        values: vec![0.5; values].into(),
    };
    let wider = PulledPart::Rows {
        rows: vec![2],
        values: Floats::F64(vec![0.5; WIDTH].into()),
    };
    let other = |start, version| Some(Kept { start, version });
    for (base, parts) in [
        (None, vec![whole(), changed(2, 0.5)]),
        (other(7, 4), vec![whole(), changed(2, 0.5)]),
        (other(8, 3), vec![whole(), changed(2, 0.5)]),
        (Some(BASE), vec![changed(2, 0.5), changed(2, 0.5)]),
        (Some(BASE), vec![whole(), whole(), changed(2, 0.5)]),
        (Some(BASE), vec![whole(), with(vec![2, 8], 4)]),
        (Some(BASE), vec![whole(), with(vec![6, 2], 4)]),
        (Some(BASE), vec![whole(), with(vec![2, 6], 3)]),
        (Some(BASE), vec![whole(), with(vec![0], 3)]),
        (Some(BASE), vec![whole(), with(vec![0], 0)]),
        (Some(BASE), vec![whole(), with(vec![], 1)]),
        (Some(BASE), vec![whole(), wider]),
    ] {
        let (mut kept, before) = kept();
        assert_eq!(kept.take(base, NOW, parts.clone()), None, "{parts:?}");
        assert_eq!(kept.kept(), None);
        assert_eq!(before[1], shard(1).weights()[0]);
    }
}
