//! An outline is a plan without its memory: the pieces that a rank moves, and their dependencies.
//! It is enough to simulate how long a collective takes, but not its result.

use super::plan::{Pipe, Plan, block_elements};
use gradring_proto::collective::Call;
pub(super) use gradring_proto::schedule::symmetry::Symmetry;
use gradring_proto::schedule::topology::Topology;
use gradring_proto::schedule::{Action, Algorithm};

/// Most bytes that move at once: about as much as a system takes from a socket.
const PIECE_BYTES: usize = 64 << 10;

/// Pieces that one rank moves in a collective.
pub struct Outline {
    pieces: Vec<Piece>,
    /// Predecessors of all pieces, one piece after the other.
    follows: Vec<u32>,
    pipes: Vec<Route>,
    /// Incoming pipes, sorted by peer.
    incoming: Vec<u32>,
}

/// Bytes that move at once.
#[derive(Clone, Copy)]
pub struct Piece {
    pub bytes: u32,
    /// End of this piece's section of `follows`, which begins where that of the previous piece
    /// ends.
    follows_end: u32,
    pub work: Work,
}

/// Work of a rank on a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Sends or receives it.
    Move,
    /// Receives and reduces it.
    MoveAndFold,
    /// Reduces values of its own.
    Fold,
}

/// Pieces of a pipe, in order.
pub struct Route {
    pub way: Way,
    /// Peer, by the rules of `Symmetry` if several ranks share an outline.
    pub peer: usize,
    pub pieces: Vec<u32>,
}

/// Direction of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Pieces go to the peer.
    Out,
    /// Pieces come from the peer.
    In,
    /// Pieces stay in the rank.
    Own,
}

impl Outline {
    /// Ranks that have equal outlines in `call`.
    pub fn symmetry(call: &Call, algorithm: Algorithm, topology: &Topology) -> Symmetry {
        let block = block_elements(call, call.dtype, topology);
        Symmetry::of(algorithm, &call.collective, topology, call.count, block)
    }

    /// Number of blocks of `call`.
    pub fn blocks(call: &Call, topology: &Topology) -> usize {
        let block = block_elements(call, call.dtype, topology);
        call.count.div_ceil(block).max(1)
    }

    /// Outline of `rank` in `call`.
    pub fn of(call: &Call, algorithm: Algorithm, rank: usize, topology: &Topology) -> Self {
        let plan = Plan::of(call, call.dtype, algorithm, rank, topology);
        let mut outline = Self {
            pieces: Vec::new(),
            follows: Vec::new(),
            pipes: Vec::new(),
            incoming: Vec::new(),
        };
        let mut firsts: Vec<u32> = Vec::with_capacity(plan.operations.len() + 1);
        for operation in &plan.operations {
            firsts.push(number(outline.pieces.len()));
            let step = PIECE_BYTES / operation.element_bytes;
            for start in operation.range.clone().step_by(step) {
                let end = operation.range.end.min(start + step);
                // The rule of `watermark`: nothing passes elements that an earlier operation has
                // not reached.
                for (earlier, common) in plan.conflicts(operation) {
                    if common.start < end {
                        let before = &plan.operations[*earlier];
                        let last = common.end.min(end) - 1 - before.range.start;
                        let piece = last / (PIECE_BYTES / before.element_bytes);
                        outline.follows.push(firsts[*earlier] + number(piece));
                    }
                }
                outline.pieces.push(Piece {
                    bytes: number((end - start) * operation.element_bytes),
                    follows_end: number(outline.follows.len()),
                    work: match operation.action {
                        None | Some(Action::Copy | Action::SetAside) => Work::Move,
                        Some(_) => Work::MoveAndFold,
                    },
                });
            }
        }
        firsts.push(number(outline.pieces.len()));
        for (way, pipes) in [
            (Way::Out, plan.outgoing.as_slice()),
            (Way::Own, std::slice::from_ref(&plan.own)),
            (Way::In, plan.incoming.as_slice()),
        ] {
            let used = pipes.iter().filter(|pipe| !pipe.operations().is_empty());
            for pipe in used {
                outline.add(way, pipe, &firsts);
            }
        }
        let pipes = outline.pipes.iter().zip(0..);
        let incoming = pipes.filter(|(route, _)| route.way == Way::In);
        outline.incoming = incoming.map(|(_, pipe)| pipe).collect();
        let peer = |&pipe: &u32| outline.pipes[pipe as usize].peer;
        outline.incoming.sort_unstable_by_key(peer);
        outline
    }

    /// Adds a pipe, given the first piece of each operation.
    fn add(&mut self, way: Way, pipe: &Pipe, firsts: &[u32]) {
        let operations = pipe.operations().iter();
        let pieces: Vec<u32> = operations
            .flat_map(|&operation| firsts[operation]..firsts[operation + 1])
            .collect();
        if way == Way::Own {
            for &piece in &pieces {
                self.pieces[piece as usize].work = Work::Fold;
            }
        }
        self.pipes.push(Route {
            way,
            peer: pipe.peer,
            pieces,
        });
    }

    #[expect(clippy::len_without_is_empty, reason = "no plan is empty")]
    pub const fn len(&self) -> usize {
        self.pieces.len()
    }

    pub fn piece(&self, number: u32) -> Piece {
        self.pieces[number as usize]
    }

    /// Pieces that must have moved before piece `number` does.
    pub fn follows(&self, number: u32) -> &[u32] {
        let ends = |index: usize| self.pieces[index].follows_end as usize;
        let index = number as usize;
        let start = index.checked_sub(1).map_or(0, ends);
        &self.follows[start..ends(index)]
    }

    /// The pipes: outgoing, own and incoming ones.
    pub fn pipes(&self) -> &[Route] {
        &self.pipes
    }

    /// Number of the pipe that comes from `peer`, if there is one.
    pub fn pipe_from(&self, peer: usize) -> Option<u32> {
        let peer_of = |&pipe: &u32| self.pipes[pipe as usize].peer;
        let place = self.incoming.binary_search_by_key(&peer, peer_of).ok()?;
        Some(self.incoming[place])
    }
}

/// Converts a count to 32 bits, which are enough for a bounded outline.
fn number(count: usize) -> u32 {
    u32::try_from(count).expect("an outline is bounded")
}
