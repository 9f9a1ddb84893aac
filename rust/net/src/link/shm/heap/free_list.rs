//! The free pieces of a heap, of which the first that fits is taken.

use std::collections::BTreeMap;
use std::ops::Range;

use super::HUGE_PAGE_BYTES;

/// Largest page of any kernel that we know. A page belongs to one block, because blocks give their
/// pages back.
const PAGE_BYTES_MAX: usize = 64 << 10;

/// Free pieces, as offsets.
pub(super) struct FreeList {
    /// End of each piece, by its start. No two pieces touch.
    ends: BTreeMap<usize, usize>,
}

impl FreeList {
    /// The list of a heap in which everything is free.
    pub(super) fn new(bytes: usize) -> Self {
        Self {
            ends: BTreeMap::from([(0, bytes)]),
        }
    }

    /// Takes a piece of at least `bytes`, in whole pages. Larger ones than a huge page begin with
    /// one.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let length = bytes.max(1).checked_next_multiple_of(PAGE_BYTES_MAX)?;
        let alignment = match length >= HUGE_PAGE_BYTES {
            true => HUGE_PAGE_BYTES,
            false => PAGE_BYTES_MAX,
        };
        let (free, taken) = self.ends.iter().find_map(|(&start, &end)| {
            let first = start.next_multiple_of(alignment);
            let last = first.checked_add(length)?;
            (last <= end).then_some((start..end, first..last))
        })?;
        self.ends.remove(&free.start);
        for rest in [free.start..taken.start, taken.end..free.end] {
            if !rest.is_empty() {
                self.ends.insert(rest.start, rest.end);
            }
        }
        Some(taken)
    }

    /// Takes back a piece that `take` has returned.
    pub(super) fn give_back(&mut self, mut piece: Range<usize>) {
        let before = self.ends.range(..piece.start).next_back();
        if let Some((&start, _)) = before.filter(|&(_, &end)| end == piece.start) {
            piece.start = start;
        }
        if let Some(end) = self.ends.remove(&piece.end) {
            piece.end = end;
        }
        self.ends.insert(piece.start, piece.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES_MAX;
    const HUGE: usize = HUGE_PAGE_BYTES;

    #[test]
    fn pieces_are_whole_pages_and_large_ones_begin_with_a_huge_page() {
        let mut list = FreeList::new(4 * HUGE);
        assert_eq!(list.take(0), Some(0..PAGE));
        assert_eq!(list.take(PAGE + 1), Some(PAGE..3 * PAGE));
        assert_eq!(list.take(HUGE + 1), Some(HUGE..2 * HUGE + PAGE));
        assert_eq!(list.take(HUGE), Some(3 * HUGE..4 * HUGE));
        assert_eq!(list.take(PAGE), Some(3 * PAGE..4 * PAGE));
        assert_eq!(list.take(HUGE), None);
        assert_eq!(list.take(usize::MAX), None);
        assert_eq!(list.take(usize::MAX - PAGE), None);
    }

    #[test]
    fn pieces_that_are_given_back_in_any_order_are_one_again() {
        let bytes = 64 * HUGE;
        let sizes = [1, HUGE, 3 * PAGE, 2 * HUGE + 5, PAGE, 7 * HUGE, 1];
        for seed in 0_u64..500 {
            let mut list = FreeList::new(bytes);
            let mut state = seed;
            let mut below = |bound: usize| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) as usize % bound
            };
            let mut taken: Vec<Range<usize>> = Vec::new();
            for _ in 0..60 {
                if below(3) > 0 {
                    let piece = list.take(sizes[below(sizes.len())]);
                    let overlaps = |other: &Range<usize>| {
                        (piece.as_ref())
                            .is_some_and(|piece| piece.start < other.end && other.start < piece.end)
                    };
                    assert!(!taken.iter().any(overlaps), "seed {seed}");
                    taken.extend(piece);
                } else if !taken.is_empty() {
                    list.give_back(taken.swap_remove(below(taken.len())));
                }
            }
            for piece in taken {
                list.give_back(piece);
            }
            assert_eq!(list.take(bytes), Some(0..bytes), "seed {seed}");
        }
    }
}
