//! One rank of a simulated collective: selects the piece that may move next.

use std::collections::VecDeque;
use std::rc::Rc;

use gradring_core::executor::{Outline, Way};

/// A rank and its progress.
pub(super) struct Rank {
    pub(super) outline: Rc<Outline>,
    /// Ends of the outgoing pipes.
    pub(super) targets: Vec<Target>,
    /// Factor by which the rank is slower than others.
    pub(super) slowness: f64,
    pipes: Vec<Head>,
    /// One bit for each piece that has moved.
    moved: Vec<u64>,
    left: usize,
    /// Pipes whose next piece waits: the awaited piece, and the pipe.
    waiting: Vec<(u32, u32)>,
    /// Pipes whose next piece may move.
    ready: VecDeque<u32>,
    pub(super) is_busy: bool,
    /// Time for which its processor has worked.
    pub(super) worked: u64,
    pub(super) finished: u64,
}

/// End of an outgoing pipe.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    /// The receiving rank, among those that are simulated.
    pub(super) rank: u32,
    /// Number of the pipe at the receiver.
    pub(super) pipe: u32,
    pub(super) distance: Distance,
}

/// Position of two ranks relative to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Distance {
    Host,
    Rack,
    Far,
}

#[derive(Clone, Copy, Default)]
struct Head {
    next: u32,
    /// Number of pieces that have arrived.
    arrived: u32,
}

impl Rank {
    pub(super) fn new(outline: Rc<Outline>, targets: Vec<Target>, slowness: f64) -> Self {
        let mut rank = Self {
            targets,
            slowness,
            pipes: vec![Head::default(); outline.pipes().len()],
            moved: vec![0; outline.len().div_ceil(64)],
            left: outline.len(),
            outline,
            waiting: Vec::new(),
            ready: VecDeque::new(),
            is_busy: false,
            worked: 0,
            finished: 0,
        };
        for pipe in 0..rank.pipes.len() {
            rank.examine(pipe as u32);
        }
        rank
    }

    pub(super) const fn is_done(&self) -> bool {
        self.left == 0
    }

    pub(super) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The pipe whose turn it is, and its next piece.
    pub(super) fn turn(&self) -> (u32, u32) {
        let pipe = self.ready[0];
        let head = self.pipes[pipe as usize].next;
        (
            pipe,
            self.outline.pipes()[pipe as usize].pieces[head as usize],
        )
    }

    /// Records that the piece whose turn it was has moved.
    pub(super) fn pass(&mut self) {
        let (pipe, piece) = self.turn();
        self.ready.pop_front();
        self.moved[piece as usize / 64] |= 1 << (piece % 64);
        self.left -= 1;
        self.pipes[pipe as usize].next += 1;
        let waiting = std::mem::take(&mut self.waiting);
        let (freed, waiting): (Vec<_>, _) = waiting
            .into_iter()
            .partition(|&(awaited, _)| awaited == piece);
        self.waiting = waiting;
        for (_, pipe) in freed {
            self.examine(pipe);
        }
        self.examine(pipe);
    }

    /// Records that a piece has arrived through a pipe.
    pub(super) fn receive(&mut self, pipe: u32) {
        let head = &mut self.pipes[pipe as usize];
        head.arrived += 1;
        if head.arrived == head.next + 1 {
            self.examine(pipe);
        }
    }

    /// Marks a pipe as ready if its next piece may move, or notes the piece that it waits for.
    fn examine(&mut self, pipe: u32) {
        let (route, head) = (
            &self.outline.pipes()[pipe as usize],
            self.pipes[pipe as usize],
        );
        let Some(&piece) = route.pieces.get(head.next as usize) else {
            return;
        };
        if route.way == Way::In && head.arrived <= head.next {
            return;
        }
        let moved = |piece: u32| self.moved[piece as usize / 64] >> (piece % 64) & 1 == 1;
        let mut follows = self.outline.follows(piece).iter();
        match follows.find(|&&earlier| !moved(earlier)) {
            Some(&earlier) => self.waiting.push((earlier, pipe)),
            None => self.ready.push_back(pipe),
        }
    }
}
