//! An update by the pure code, for tests of this crate and of the servers.

use gradring_proto::parameters::identity::{Incarnation, PushId};
use gradring_proto::parameters::log::{Contribution, Entry};
use gradring_proto::parameters::optimizer::Hyper;
use gradring_proto::parameters::rules::Treatment;
use gradring_proto::parameters::shard::{Gradient, Push, Shard};

/// Performs an update by the mean of `gradients`, one from each worker and each with weight 1.
pub(crate) fn apply_mean(shard: &mut Shard, version: u64, gradients: &[Gradient], hyper: Hyper) {
    let contribution = |worker| Contribution {
        id: PushId {
            worker,
            incarnation: Incarnation(1, 1),
            number: 1,
        },
        treatment: Treatment {
            weight: 1.0,
            compensation: None,
        },
    };
    let entry = Entry {
        contributions: (0..gradients.len() as u32).map(contribution).collect(),
        scale: 1.0 / gradients.len() as f64,
        hyper,
    };
    assert!(gradients.iter().all(|it| shard.fits(&[Some(it.clone())])));
    let pushed: Vec<_> = gradients
        .iter()
        .map(|gradient| Push {
            gradients: vec![Some(gradient)],
            then: None,
        })
        .collect();
    shard.apply(version, &entry, &pushed);
}
