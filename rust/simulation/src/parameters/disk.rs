//! Disk of a simulated server, which outlives its process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use gradring_proto::parameters::identity::{Point, Terms, Version};
use gradring_proto::parameters::server::Disk;
use gradring_proto::parameters::snapshot::Snapshot;

#[derive(Default)]
pub(super) struct Contents {
    terms: Terms,
    snapshots: BTreeMap<Point, Snapshot>,
    /// Snapshots that are being written.
    pub(super) writing: Vec<Snapshot>,
}

#[derive(Clone, Default)]
pub(super) struct SimulatedDisk(pub(super) Rc<RefCell<Contents>>);

impl SimulatedDisk {
    /// Completes a snapshot.
    pub(super) fn finish(&self, snapshot: Snapshot) {
        let mut contents = self.0.borrow_mut();
        if contents.terms.contains(snapshot.point) {
            contents.snapshots.insert(snapshot.point, snapshot);
        }
    }
}

impl Disk for SimulatedDisk {
    fn terms(&self) -> Terms {
        self.0.borrow().terms.clone()
    }

    fn points(&self) -> Vec<Point> {
        self.0.borrow().snapshots.keys().copied().collect()
    }

    fn load(&mut self, point: Point) -> Option<Snapshot> {
        self.0.borrow().snapshots.get(&point).cloned()
    }

    fn begin(&mut self, terms: &Terms) {
        let mut contents = self.0.borrow_mut();
        contents.terms = terms.clone();
        contents.snapshots.retain(|point, _| terms.contains(*point));
    }

    fn save(&mut self, snapshot: Snapshot) {
        self.0.borrow_mut().writing.push(snapshot);
    }

    fn forget_before(&mut self, version: Version) {
        let mut contents = self.0.borrow_mut();
        contents
            .snapshots
            .retain(|point, _| point.version >= version);
    }
}
